"""Where the target's states of a batch come from: a pass of the target, or a bounded cache on disk.

    row i < C     read from the cache, which is filled before the first step
    other rows    a pass of the target

C follows from the settings and the shape of the rows alone, so a resumed run takes each row from where the
killed one took it. From either source states are rounded to bf16, in which a runner keeps those that a head
reads while it drafts (``runtime/kv/hidden_pool.py``).

Letters: N rows, of which C are in the cache, B rows a batch, S tokens a row, m layers, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

from attar.checkpoint import atomic
from attar.data.examples import Examples
from attar.distillation.heads.target_pass import TargetPass, run_target
from attar.models.head import Head
from attar.progress import Progress

ROWS = 64  # of a file


@dataclass(frozen=True, kw_only=True)
class NumberedRows(Examples):
    """Rows that know which of the different rows they are.

    Attributes:
        numbers: int64 (N,).
    """

    numbers: Tensor

    @classmethod
    def of(cls, rows: Examples) -> tuple[Self, Examples]:
        """The rows with their numbers, and the different ones in that order."""
        both = torch.cat([rows.tokens, rows.targets], 1)
        different, numbers = torch.unique(both, dim=0, return_inverse=True)
        tokens, targets = different.split(rows.tokens.shape[1], 1)
        numbered = cls(tokens=rows.tokens, targets=rows.targets, numbers=numbers)
        return numbered, Examples(tokens.contiguous(), targets.contiguous())


@dataclass(frozen=True)
class StateCache:
    """The states of the first C rows on disk, :data:`ROWS` a file.

    Attributes:
        rows: C.
    """

    folder: Path
    rows: int

    def read(self, number: int, width: int) -> tuple[Tensor, Tensor]:
        """Of a row: the states bf16 (width, m, H), and what the target's head reads, bf16 (width, H)."""
        file, row = divmod(number, ROWS)
        with safe_open(self._file(file), "pt") as tensors:
            states, final = (tensors.get_slice(name)[row, :width] for name in ("states", "final"))
        return states, final

    def fill(self, source: TargetStates, rows: Examples, batch_size: int, progress: Progress) -> None:
        """Run the target over the rows whose file is missing.

        Args:
            rows: the different rows (N, S), by number.
        """
        starts = range(0, self.rows, ROWS)
        self.folder.mkdir(parents=True, exist_ok=True)
        with progress.task("states", total=len(starts)) as task:
            for number, start in enumerate(starts):
                if not self._file(number).exists():
                    part = rows[start : min(start + ROWS, self.rows)]
                    atomic.save_tensors(self._file(number), _states_of(source, part, batch_size))
                task.advance()

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:06d}.safetensors"


@dataclass(frozen=True)
class TargetStates:
    """The source of passes.

    Attributes:
        target: frozen.
        head: the target's own.
        layers: that the draft head reads.
        cache: of :class:`NumberedRows`; None: every batch is run.
    """

    target: Any
    head: Head
    layers: tuple[int, ...]
    cache: StateCache | None = None

    def run(self, batch: Examples) -> TargetPass:
        """A pass over a batch, or what the cache has of it."""
        batch = batch.trimmed()
        cached = self._cached(batch)
        if cached is None:
            return _rounded(run_target(self.target, self.head, self.layers, batch))
        if not bool(cached.all()):
            return self._mixed(batch, cached)
        states, final = self._read(batch)
        return TargetPass(batch, states, final, self.head, self.embedding)

    def cached(
        self, folder: Path, rows: Examples, most: int, batch_size: int, progress: Progress
    ) -> TargetStates:
        """The same with a cache of the first ``most`` of the different rows, filled."""
        cache = StateCache(folder, min(most, len(rows)))
        if not cache.rows:
            return self
        cache.fill(self, rows, batch_size, progress)
        return replace(self, cache=cache)

    @property
    def embedding(self) -> Tensor:
        """The target's own (V, H)."""
        weight: Tensor = self.target.get_input_embeddings().weight
        return weight

    @property
    def rows(self) -> int:
        """C."""
        return 0 if self.cache is None else self.cache.rows

    def _cached(self, batch: Examples) -> Tensor | None:
        """bool (B,) which rows are in the cache; None: none of them."""
        if self.cache is None or not isinstance(batch, NumberedRows):
            return None
        cached = batch.numbers < self.cache.rows
        return cached if bool(cached.any()) else None

    def _mixed(self, batch: Examples, cached: Tensor) -> TargetPass:
        """A batch of which some rows are run."""
        passed, width = self.run(batch[~cached]), batch.tokens.shape[1]
        states, final = self._read(batch[cached])
        whole_states = states.new_zeros(len(batch), width, *states.shape[2:])
        whole_final = final.new_zeros(len(batch), width, final.shape[-1])
        whole_states[cached], whole_final[cached] = states, final
        beyond = width - passed.final.shape[1]
        whole_states[~cached] = F.pad(passed.states, (0, 0, 0, 0, 0, beyond))
        whole_final[~cached] = F.pad(passed.final, (0, 0, 0, beyond))
        return TargetPass(batch, whole_states, whole_final, self.head, self.embedding)

    def _read(self, batch: Examples) -> tuple[Tensor, Tensor]:
        assert self.cache is not None and isinstance(batch, NumberedRows)
        rows = [self.cache.read(number, batch.tokens.shape[1]) for number in batch.numbers.tolist()]
        device = batch.tokens.device
        states, final = (torch.stack(parts).to(device).float() for parts in zip(*rows, strict=True))
        return states, final


def row_bytes(length: int, layers: int, hidden: int) -> int:
    """Bytes of a row in the cache."""
    return 2 * length * (layers + 1) * hidden


def _rounded(passed: TargetPass) -> TargetPass:
    states, final = (x.to(torch.bfloat16).float() for x in (passed.states, passed.final))
    return replace(passed, states=states, final=final)


def _states_of(source: TargetStates, rows: Examples, batch_size: int) -> dict[str, Tensor]:
    """The tensors of a file."""
    parts, length = [], rows.tokens.shape[1]
    for batch in rows.split(batch_size):
        passed = source.run(batch.to(source.head.weight.device))
        beyond = length - passed.final.shape[1]
        states, final = F.pad(passed.states, (0, 0, 0, 0, 0, beyond)), F.pad(passed.final, (0, 0, 0, beyond))
        parts.append((states.to("cpu", torch.bfloat16), final.to("cpu", torch.bfloat16)))
    all_states, all_final = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return {"states": all_states.contiguous(), "final": all_final.contiguous()}
