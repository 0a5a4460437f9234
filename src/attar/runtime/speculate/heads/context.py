"""Which of a sequence's hidden states a proposer has read, and the next ones.

With n tokens, the last of which the target has not run, positions [0, n - 1) have states in the slots of the
sequence's blocks. What is decided does not change, so a position is read once; a block that was exchanged (by
copy-on-write, or after a preemption) is read again from its start. Where a prefix came from the cache its
states are there as well. Positions whose block was released cannot be read: the context begins behind them.

Where more than ``window`` positions are unread only the last of them are read, and the context begins there:
all of a long prompt would take more passes than a short answer has. WINDOW loses no acceptance that could be
measured (docs/speculation.md).

Letters: n tokens, m layers, H hidden size, B slots of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from attar.runtime.kv.hidden_pool import HiddenPool
from attar.runtime.speculate.proposer import DraftRequest
from attar.runtime.step import FREED, slots

WINDOW = 128  # positions


class ContextReader:
    """Reads each position of a sequence once.

    Args:
        block_size: B.
        layers: of the pool, whose states are read; None: all that it has now.
        window: most positions that are read at once.
    """

    def __init__(
        self,
        pool: HiddenPool,
        block_size: int,
        layers: Sequence[int] | None = None,
        window: float = math.inf,
    ) -> None:
        self.pool, self.block_size, self.window = pool, block_size, window
        self.layers = pool.layers if layers is None else tuple(layers)
        self._read: dict[int, tuple[tuple[int, ...], int]] = {}  # the blocks, and how many positions

    def unread(self, request: DraftRequest) -> tuple[int, Tensor]:
        """The first position that was not read, and the states float32 (count, m, H) from there to n - 1;
        they count as read."""
        stop, blocks = len(request.tokens) - 1, tuple(request.blocks)
        before, count = self._read.get(request.sequence, ((), 0))
        pairs = enumerate(zip(before, blocks, strict=False))
        changed = next((i for i, (old, new) in pairs if new not in (old, FREED)), len(before))
        start = max(min(count, changed * self.block_size), self._first(blocks))
        if stop - start > self.window:
            start = stop - int(self.window)
        self._read[request.sequence] = blocks, stop
        return start, self.states(blocks, start, stop)

    def last(self, request: DraftRequest) -> Tensor:
        """The states (m, H) of position n - 2, behind the last token that was run."""
        stop = len(request.tokens) - 1
        return self.states(request.blocks, stop - 1, stop)[0]

    def states(self, blocks: Sequence[int], start: int, stop: int) -> Tensor:
        """float32 (stop - start, m, H)."""
        if stop <= start:
            return self.pool.read(np.empty(0, dtype=np.int64), self.layers)
        return self.pool.read(slots(blocks, start, stop, self.block_size), self.layers)

    def forget(self, sequence: int) -> None:
        """A sequence ended."""
        self._read.pop(sequence, None)

    def _first(self, blocks: Sequence[int]) -> int:
        """The first position behind the blocks that were released."""
        released = next((i for i, block in enumerate(blocks) if block != FREED), len(blocks))
        return released * self.block_size
