"""Rollouts: rows that the teacher generates itself, after some tokens of text.

Sequence-level distillation learns from them (Kim, Rush 2016, arXiv 1606.07947, section 3.2). A draft model
predicts in contexts that its target has generated, so it trains on such contexts (DistillSpec, Zhou et al.
2023, arXiv 2310.08461, section 4: data from the target). Rows are drawn by the runtime, :data:`ROWS` at a
time, from weights that are not rounded. Each batch has its own seed and file, so that a killed run continues
after the last batch and ends with the same rows.

Differs from Kim and Rush: rows are sampled, not found by beam search.

Letters: N rows, S tokens a row, P prompt tokens of text, V tokens that may be sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from attar.checkpoint import atomic
from attar.checkpoint.processes import SINGLE_PROCESS, Processes
from attar.data.examples import Examples
from attar.data.packing import pack
from attar.distillation.head_settings import TrainHeadSettings
from attar.distillation.rollouts.sampling import ROWS, completions, joined, prompt_lengths, sample_rows
from attar.distillation.settings import DistillSettings
from attar.distillation.tasks.task import HELD_OUT_TOKENS
from attar.models.loading.plain_config import end_tokens
from attar.progress import Progress
from attar.runtime.runner.from_model import runner_of

HELD_OUT_SEED = 1 << 32  # no training seed draws the held-out rows


@dataclass(frozen=True)
class RolloutWriter:
    """The teacher as a source of rows.

    Attributes:
        length: S.
        work: folder of the finished batches, which the processes share.
        processes: each writes some of the batches.
    """

    teacher: Any
    tokenizer: Any
    settings: DistillSettings | TrainHeadSettings
    length: int
    work: Path
    progress: Progress
    processes: Processes = SINGLE_PROCESS

    @property
    def prompt(self) -> int:
        """P."""
        return min(self.settings.prompt_tokens, self.length - 1)

    def training_rows(self, count: int, text: Examples) -> Examples:
        """``count`` rows, ``teacher_share`` of them rollouts after prompts of the text; both kinds repeat as
        needed.

        Args:
            text: rows (M, S).
        """
        generated = round(self.settings.teacher_share * count)
        if not generated:
            return text
        settings = self.settings
        prompts = repeated(text, min(settings.teacher_rows.num_rollouts, generated))
        rollouts = self.after_text(prompts, settings.rollout_temperature, settings.seed, "train")
        return joined([repeated(rollouts, generated), repeated(text, count - generated)])

    def held_out_rows(self) -> Examples:
        """About ``HELD_OUT_TOKENS`` tokens generated after held-out text at temperature 1; the same rows
        whatever the seed of the settings."""
        rows = max(HELD_OUT_TOKENS // (self.length - self.prompt), 1)
        data, bos = self.settings.data, self.settings.bos
        packed = pack(self.tokenizer, data, "calibration", length=self.length, rows=rows, seed=0, bos=bos)
        return self.after_text(Examples.of_text(packed.rows), 1.0, HELD_OUT_SEED, "held-out")

    def after_text(self, text: Examples, temperature: float, seed: int, folder: str) -> Examples:
        """Rows after the prompts of rows of text."""
        lengths = prompt_lengths(text, self.prompt).tolist()
        prompts = [row[:n].tolist() for row, n in zip(text.tokens, lengths, strict=True)]
        return self.after(prompts, temperature, seed, folder)

    def after(self, prompts: Sequence[Sequence[int]], temperature: float, seed: int, folder: str) -> Examples:
        """A row after each prompt; only what the teacher wrote is predicted."""
        rows = write_rows(
            self.teacher,
            prompts,
            self.length,
            vocabulary=len(self.tokenizer),
            ends=end_tokens(
                getattr(self.teacher, "generation_config", None), self.teacher.config, self.tokenizer
            ),
            temperature=temperature,
            seed=seed,
            work=self.work / folder,
            processes=self.processes,
            progress=self.progress,
        )
        return completions(rows, torch.tensor([len(prompt) for prompt in prompts]))


def held_out_tokens() -> int:
    """About how many tokens are generated to measure with."""
    return HELD_OUT_TOKENS


def repeated(rows: Examples, count: int) -> Examples:
    """``count`` rows, one after the other and again from the first."""
    return rows[torch.arange(count) % len(rows)]


def write_rows(
    teacher: Any,
    prompts: Sequence[Sequence[int]],
    length: int,
    *,
    vocabulary: int,
    ends: tuple[int, ...],
    temperature: float,
    seed: int,
    work: Path,
    processes: Processes = SINGLE_PROCESS,
    progress: Progress,
) -> Tensor:
    """Continue each prompt with the teacher: int64 (N, S) on the CPU, each row beginning with its prompt.

    Args:
        teacher: a causal language model of transformers in evaluation mode.
        prompts: N, each shorter than S.
        length: S.
        vocabulary: V; rows that only pad the vocabulary are never sampled.
        ends: tokens that end a text; positions after the first one sampled are ``PADDING``.
        work: folder of the finished batches; a run with the same arguments resumes from it, and one with
            fewer of the prompts takes its rows from it. Rows after other prompts are written anew.
        processes: each writes some of the batches into it; all get all rows.
    """
    work.mkdir(parents=True, exist_ok=True)
    starts, runner = range(0, len(prompts), ROWS), None
    files = [work / f"{number:06d}.safetensors" for number in range(len(starts))]
    assigned = range(processes.rank, len(starts), processes.count)
    with progress.task("rollouts", total=len(assigned)) as task:
        for number in assigned:
            start, file = starts[number], files[number]
            batch = prompts[start : start + ROWS]
            if not _kept(file, batch):
                runner = runner or runner_of(teacher, sequences=ROWS, length=length, exact=True)
                rows, _ = sample_rows(
                    runner,
                    batch,
                    length,
                    vocabulary=vocabulary,
                    ends=ends,
                    seed=seed * 1_000_003 + start,
                    temperature=temperature,
                )
                atomic.save_tensors(file, {"tokens": rows})
            task.advance()
    processes.wait()
    parts = [
        load_file(file)["tokens"][: len(prompts) - start] for start, file in zip(starts, files, strict=True)
    ]
    return torch.cat(parts)


def _kept(file: Path, prompts: Sequence[Sequence[int]]) -> bool:
    """Whether the first rows of a finished batch follow the prompts."""
    if not file.exists():
        return False
    rows = load_file(file)["tokens"][: len(prompts)]
    pairs = zip(rows, prompts, strict=False)
    return len(rows) == len(prompts) and all(
        row[: len(prompt)].tolist() == list(prompt) for row, prompt in pairs
    )
