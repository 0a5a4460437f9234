"""A source of batches of which a fraction is the student's own text, from a buffer that follows the student.

    GKD (Agarwal et al. 2023, arXiv 2306.13649, algorithm 1): a fraction lambda of the batches is sampled from
    the student, the others are from a data set.

Steps are divided into rounds of ``rollout_every``. At the start of a round the student writes rows with its
current weights; batches draw from them without repetition before all were used. The others are text, or what
the teacher wrote.

Each round is a few files in the work folder, renamed whole. A killed run resumes from a state that may lie
inside a round: the files have the rows that were written at its start. A file that lies ahead of the state is
what the resumed run would write again, for weights, prompts and seed are the same.

Differs from the paper: the fraction is exact, not drawn, so that a run is the same with any number of
processes. They write a round's rows in turn.

Letters: lambda fraction; B rows a batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import distributed

from attar.checkpoint import atomic
from attar.data.examples import Examples
from attar.data.packing import Batches
from attar.distillation.rollouts.sampling import ROWS, Rollouts, joined
from attar.distillation.rollouts.student import StudentWriter
from attar.distillation.settings import LearnSettings
from attar.progress import Progress

STORED = ("tokens", "targets", "behaviour", "policy")
EXACT = 1e-9  # for the rounding of lambda times a count


@dataclass
class RolloutBuffer:
    """A source of batches, see :class:`attar.walks.train.BatchSource`.

    Attributes:
        text: rows that are learned from, and whose prompts the student continues.
    """

    text: Examples
    writer: StudentWriter
    settings: LearnSettings
    work: Path
    progress: Progress
    _rounds: dict[int, Rollouts] = field(default_factory=dict, repr=False)

    def batch(self, number: int, model: Any) -> Examples:
        """See :class:`attar.walks.train.BatchSource`."""
        size = self.settings.batch_size
        if not self._student_batches(number + 1) - self._student_batches(number):
            return Batches(self.text, size, self.settings.seed)[number]  # type: ignore[no-any-return]
        now = number // self._per_round
        used = self._student_batches(number) - self._student_batches(now * self._per_round)
        rollouts: Rollouts = Batches(self._rows(now, model), size, self.settings.seed + now + 1)[used]
        if self.settings.soft_loss == "minillm":
            return joined([rollouts, as_text(Batches(self.text, size, self.settings.seed)[number])])
        return rollouts

    @property
    def ranks(self) -> int:
        """Processes of the run."""
        return distributed.get_world_size() if _several() else 1

    @property
    def rank(self) -> int:
        """The number of this process."""
        return distributed.get_rank() if _several() else 0

    @property
    def _per_round(self) -> int:
        """Micro-batches in a round."""
        return self.settings.rollouts.rollout_every * self.settings.accumulate

    def _student_batches(self, micro: int) -> int:
        """How many of the first micro-batches are the student's text."""
        return math.floor(micro * self.settings.student_share + EXACT)

    def _written(self, now: int) -> int:
        """Rows that a round writes: each is used about once."""
        last = min((now + 1) * self._per_round, self.settings.steps * self.settings.accumulate)
        used = self._student_batches(last) - self._student_batches(now * self._per_round)
        return used * self.settings.batch_size

    def _rows(self, now: int, model: Any) -> Rollouts:
        """The rows of a round; written where they are not."""
        if now not in self._rounds:
            self._rounds = {now: self._round(now, model)}
        return self._rounds[now]

    def _round(self, number: int, model: Any) -> Rollouts:
        """The rows of a round, from its files; processes write them in turn."""
        offset, count = sum(self._written(earlier) for earlier in range(number)), self._written(number)
        starts = range(0, count, ROWS)
        self.work.mkdir(parents=True, exist_ok=True)
        with self.progress.task("rollouts", total=len(starts)) as task:
            for part, start in enumerate(starts):
                file = self._file(number, part)
                if part % self.ranks == self.rank and not file.exists():
                    rows = self._write(model, offset + start, min(ROWS, count - start))
                    atomic.save_tensors(file, {name: getattr(rows, name) for name in STORED})
                task.advance()
        if self.ranks > 1:
            distributed.barrier()
        parts = [Rollouts(**load_file(self._file(number, part))) for part in range(len(starts))]
        self._forget(number)
        return joined(parts)

    def _write(self, model: Any, first: int, count: int) -> Rollouts:
        """Rows ``first`` and following of the run."""
        order = Batches(self.text, 1, self.settings.seed + 1)
        prompts = joined([order[row] for row in range(first, first + count)])
        return self.writer.write(model, prompts, (self.settings.seed + 1) * 1_000_003 + first)

    def _file(self, number: int, part: int) -> Path:
        return self.work / f"{number:06d}-{part:04d}.safetensors"

    def _forget(self, now: int) -> None:
        """Delete the files of rounds that no resumed run reads."""
        settings = self.settings
        behind = settings.checkpoint_every // settings.rollouts.rollout_every + 1
        for file in self.work.glob("*.safetensors"):
            if int(file.name[:6]) < now - behind - 1 and self.rank == 0:
                file.unlink(missing_ok=True)


def _several() -> bool:
    return bool(distributed.is_available() and distributed.is_initialized())


def as_text(examples: Examples) -> Rollouts:
    """Rows of a data set; their behaviour and policy log-probabilities are NaN."""
    unknown = torch.full(examples.tokens.shape, math.nan)
    return Rollouts(tokens=examples.tokens, targets=examples.targets, behaviour=unknown, policy=unknown)
