"""What ``attar distill --for-drafting`` adds to distillation: rows of the teacher's own, a loss that counts
accepted tokens, and a report of how many there will be.

    rows     ``share`` of them written by the teacher after a few tokens of text, the rest text
    loss     ``draft_loss``: lk, tv (drafting.py) or kl (forward_kl.py)
    report   on rows the teacher wrote after held-out text at temperature 1: acceptance a, greedy agreement,
             tokens a pass, as a chain of K drafts would bring

Tokens a pass are told twice. By theory, (1 - a^(K+1)) / (1 - a): as if every place had the mean acceptance.
By the rows: for x drawn from p, the mean over starts of prod min(1, q(x_i) / p(x_i)) over i drafts is the
probability that i of them are accepted (sum over x of q min(1, p / q) = sum over x of p min(1, q / p)), so
their sum is what a chain with the token-wise rule brings, easy and hard places as they follow each other.

Letters: p, q target and draft; K drafted; a acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.data.packing import PADDING, pack
from attar.distillation.drafting import acceptance, expected_tokens, lk, total_variation
from attar.distillation.forward_kl import forward_kl
from attar.distillation.samples import write_rows
from attar.distillation.settings import DistillSettings
from attar.models.plain_config import end_tokens
from attar.progress import Progress

LOSSES = {"lk": lk, "tv": total_variation, "kl": forward_kl}
DRAFTS = (1, 2, 4, 8)  # K of the report
HELD_OUT_TOKENS = 16_384  # about so many are measured on
HELD_OUT_SEED = 1 << 32  # held-out rows are never drawn like the training rows of another seed


@dataclass(frozen=True)
class Writer:
    """The teacher as a writer of rows.

    Attributes:
        length: S, tokens a row.
        work: folder of what it has written.
    """

    teacher: Any
    tokenizer: Any
    settings: DistillSettings
    length: int
    work: Path
    progress: Progress

    @property
    def prompt(self) -> int:
        """P: tokens of text in front of its own."""
        return min(self.settings.prompt_tokens, self.length - 1)

    def training_rows(self, wanted: int, text: Tensor) -> Tensor:
        """``wanted`` rows int64 (N, S), ``share`` of them the teacher's; both kinds repeat as needed.

        Args:
            wanted: rows of the whole run.
            text: int64 (M, S) rows of text.
        """
        own = round(self.settings.share * wanted)
        if not own:
            return text
        settings = self.settings
        seed, count = settings.seed, min(settings.samples, own)
        written = self._rows("train", count, settings.temperature, seed, seed, "train")
        return torch.cat([_repeat(written, own), _repeat(text, wanted - own)])

    def held_out_rows(self) -> Tensor:
        """About ``HELD_OUT_TOKENS`` tokens of the teacher's own after held-out text, drawn at temperature 1;
        the same rows whatever the seed of the settings."""
        rows = max(HELD_OUT_TOKENS // (self.length - self.prompt), 1)
        return self._rows("calibration", rows, 1.0, 0, HELD_OUT_SEED, "held-out")

    def _rows(self, split: str, rows: int, temperature: float, order: int, seed: int, name: str) -> Tensor:
        data, bos, length = self.settings.data, self.settings.bos, self.prompt
        prompts = pack(self.tokenizer, data, split, length=self.length, rows=rows, seed=order, bos=bos)
        return write_rows(
            self.teacher,
            prompts[:, :length],
            self.length,
            vocabulary=len(self.tokenizer),
            ends=end_tokens(
                getattr(self.teacher, "generation_config", None), self.teacher.config, self.tokenizer
            ),
            temperature=temperature,
            seed=seed,
            work=self.work / name,
            progress=self.progress,
        )


def _repeat(rows: Tensor, count: int) -> Tensor:
    return rows[torch.arange(count) % len(rows)]


@torch.inference_mode()  # type: ignore[untyped-decorator]
def report(student: Any, teacher: Any, rows: Tensor, prompt: int, batch: int) -> dict[str, Any]:
    """How the student drafts for the teacher, in float32, at temperature 1.

    Args:
        rows: int64 (N, S) written by the teacher at temperature 1, padded with ``PADDING``.
        prompt: P: the first tokens of a row, which are text and do not count.
        batch: rows in one pass.

    Returns:
        ``acceptance`` a, ``greedy_agreement`` (fraction of places with the same likeliest token), ``tokens``
        counted, and for each K tokens a pass: ``by_theory`` and ``by_rows``.
    """
    student.eval()
    overlaps, agreements, ratios = [], [], []
    for part in rows.split(batch):
        shown = part.clamp(min=0).to(teacher.device)
        target, draft = (
            model(input_ids=shown).logits[:, prompt - 1 : -1].float() for model in (teacher, student)
        )
        width = min(target.shape[-1], draft.shape[-1])
        target, draft = target[..., :width], draft[..., :width]
        following = part[:, prompt:].to(teacher.device)
        real = following != PADDING
        overlaps.append(acceptance(draft, target)[real])
        agreements.append((draft.argmax(-1) == target.argmax(-1))[real])
        chosen = following.clamp(min=0)[..., None]
        log_p, log_q = (z.log_softmax(-1).gather(-1, chosen)[..., 0] for z in (target, draft))
        ratios.append((log_q - log_p).clamp(max=0.0).masked_fill(~real, torch.nan).double())
    a = float(torch.cat(overlaps).double().mean())
    return {
        "acceptance": a,
        "greedy_agreement": float(torch.cat(agreements).double().mean()),
        "tokens": sum(len(part) for part in overlaps),
        "by_theory": {str(K): expected_tokens(a, K) for K in DRAFTS},
        "by_rows": {str(K): by_rows(torch.cat(ratios), K) for K in DRAFTS},
    }


def by_rows(log_ratios: Tensor, K: int) -> float:
    """1 + sum over i = 1..K of the mean probability that i drafts in a row are accepted.

    Args:
        log_ratios: (N, S) min(0, ln q(x) - ln p(x)) of each token of the rows; NaN where there is none.
    """
    total = 1.0
    for count in range(1, min(K, log_ratios.shape[1]) + 1):
        runs = log_ratios.unfold(1, count, 1).sum(-1)
        total += float(runs[~runs.isnan()].exp().mean()) if bool((~runs.isnan()).any()) else 0.0
    return total


def words(numbers: dict[str, Any]) -> str:
    """The report in two lines, for the terminal."""
    theory = ", ".join(f"{value:.2f}" for value in numbers["by_theory"].values())
    rows = ", ".join(f"{value:.2f}" for value in numbers["by_rows"].values())
    return (
        f"acceptance {numbers['acceptance']:.3f} at temperature 1, greedy agreement "
        f"{numbers['greedy_agreement']:.3f}, over {numbers['tokens']:,} tokens of the teacher's own\n"
        f"tokens a pass with {', '.join(numbers['by_theory'])} drafts: {rows} (theory {theory})"
    )
