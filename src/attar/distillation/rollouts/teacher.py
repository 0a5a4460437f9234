"""Rollouts: rows that the teacher generates itself, after some tokens of text.

A draft model predicts in contexts that its target has generated, so it trains on such contexts
(DistillSpec, Zhou et al. 2023, arXiv 2310.08461, section 4: data from the target). Rows are sampled in
float32, :data:`ROWS` at a time over one KV cache. Each batch has its own seed and file, so that a killed
run continues after the last batch and ends with the same rows.

Letters: N rows, S tokens a row, P prompt tokens of text, V tokens that may be sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache

from attar.checkpoint import atomic
from attar.data.packing import PADDING, numbered_generator, pack
from attar.distillation.settings import DistillSettings
from attar.distillation.tasks.task import HELD_OUT_TOKENS
from attar.models.plain_config import end_tokens
from attar.progress import Progress

ROWS = 64  # sampled together
HELD_OUT_SEED = 1 << 32  # no training seed draws the held-out rows


@dataclass(frozen=True)
class RolloutWriter:
    """The teacher as a source of rows.

    Attributes:
        length: S.
    """

    teacher: Any
    tokenizer: Any
    settings: DistillSettings
    length: int
    work: Path
    progress: Progress

    @property
    def prompt(self) -> int:
        """P."""
        return min(self.settings.rollouts.prompt_tokens, self.length - 1)

    def training_rows(self, count: int, text: Tensor) -> Tensor:
        """``count`` rows int64 (N, S), ``teacher_share`` of them rollouts; both kinds repeat as needed.

        Args:
            text: int64 (M, S) rows of text.
        """
        own = round(self.settings.teacher_share * count)
        if not own:
            return text
        settings = self.settings
        seed, rows = settings.seed, min(settings.rollouts.samples, own)
        rollouts = self._rollouts("train", rows, settings.temperature, seed, seed, "train")
        return torch.cat([_repeat(rollouts, own), _repeat(text, count - own)])

    def held_out_rows(self) -> Tensor:
        """About ``HELD_OUT_TOKENS`` tokens generated after held-out text at temperature 1; the same rows
        whatever the seed of the settings."""
        rows = max(HELD_OUT_TOKENS // (self.length - self.prompt), 1)
        return self._rollouts("calibration", rows, 1.0, 0, HELD_OUT_SEED, "held-out")

    def _rollouts(
        self, split: str, rows: int, temperature: float, text_seed: int, seed: int, folder: str
    ) -> Tensor:
        data, bos = self.settings.data, self.settings.bos
        packed = pack(self.tokenizer, data, split, length=self.length, rows=rows, seed=text_seed, bos=bos)
        return write_rows(
            self.teacher,
            packed.rows[:, : self.prompt],
            self.length,
            vocabulary=len(self.tokenizer),
            ends=end_tokens(
                getattr(self.teacher, "generation_config", None), self.teacher.config, self.tokenizer
            ),
            temperature=temperature,
            seed=seed,
            work=self.work / folder,
            progress=self.progress,
        )


def _repeat(rows: Tensor, count: int) -> Tensor:
    return rows[torch.arange(count) % len(rows)]


def write_rows(
    teacher: Any,
    prompts: Tensor,
    length: int,
    *,
    vocabulary: int,
    ends: tuple[int, ...],
    temperature: float,
    seed: int,
    work: Path,
    progress: Progress,
) -> Tensor:
    """Continue each prompt with the teacher: int64 (N, S) on the CPU, each row beginning with its prompt.

    Args:
        teacher: a causal language model of transformers in evaluation mode.
        prompts: int64 (N, P), without padding; P < S.
        length: S.
        vocabulary: V; rows that only pad the vocabulary are never sampled.
        ends: tokens that end a text; positions after the first one sampled are ``PADDING``.
        work: folder of the finished batches; a run with the same arguments resumes from it.
    """
    work.mkdir(parents=True, exist_ok=True)
    batches = prompts.split(ROWS)
    finished: list[Tensor] = []
    with progress.task("rollouts", total=len(batches)) as task:
        for number, batch in enumerate(batches):
            file = work / f"{number:06d}.safetensors"
            if not file.exists():
                generator = numbered_generator(seed, number)
                rows = _sample(teacher, batch, length, vocabulary, ends, temperature, generator)
                atomic.save_tensors(file, {"tokens": rows})
            finished.append(load_file(file)["tokens"])
            task.advance()
    return torch.cat(finished)


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _sample(
    teacher: Any,
    prompts: Tensor,
    length: int,
    vocabulary: int,
    ends: tuple[int, ...],
    temperature: float,
    generator: torch.Generator,
) -> Tensor:
    """One batch; sampled on the CPU, so that the same logits give the same tokens on every device."""
    rows = torch.full((prompts.shape[0], length), PADDING, dtype=torch.int64)
    rows[:, : prompts.shape[1]] = prompts
    cache = DynamicCache(config=teacher.config)
    ended = torch.zeros(prompts.shape[0], dtype=torch.bool)
    end_ids = torch.tensor(ends, dtype=torch.int64)
    tokens = prompts
    for position in range(prompts.shape[1], length):
        z = teacher(
            input_ids=tokens.to(teacher.device), past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits
        p = (z[:, -1, :vocabulary].float() / temperature).softmax(-1).cpu()
        sampled = torch.multinomial(p, 1, generator=generator)[:, 0]
        rows[~ended, position] = sampled[~ended]
        ended |= torch.isin(sampled, end_ids)
        if bool(ended.all()):
            break
        tokens = sampled[:, None]
    return rows
