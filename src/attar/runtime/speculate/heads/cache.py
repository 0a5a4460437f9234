"""Keys and values of the layers of a draft head, for the decided tokens of each sequence.

They are made of the target's hidden states and decided tokens alone, never of the head's own drafts, so a
position is written once, or again where its block was exchanged (``context.py``).

Letters: l layers of the head, n positions, K kv heads, d head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 64  # positions of a new sequence


class HeadCache:
    """One tensor a sequence, twice as long whenever it is full.

    Args:
        layers: l.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int) -> None:
        self.shape = (2, layers, kv_heads, head_dim)
        self._rows: dict[int, Tensor] = {}  # (2, l, capacity, K, d)
        self._counts: dict[int, int] = {}

    def write(self, sequence: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Positions from ``start`` on (l, count, K, d); what was behind them is gone."""
        two, layers, kv_heads, head_dim = self.shape
        stop = start + keys.shape[1]
        rows = self._rows.get(sequence)
        if rows is None or rows.shape[2] < stop:
            capacity = max(LEAST, 2 * stop)
            grown = keys.new_zeros(two, layers, capacity, kv_heads, head_dim)
            if rows is not None:
                grown[:, :, :start] = rows[:, :, :start]
            rows = self._rows[sequence] = grown
        rows[0, :, start:stop], rows[1, :, start:stop] = keys, values
        self._counts[sequence] = stop

    def read(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Keys and values (l, n, K, d) of a sequence, views."""
        if sequence not in self._rows:
            two, layers, kv_heads, head_dim = self.shape
            empty = torch.zeros(two, layers, 0, kv_heads, head_dim)
            return empty[0], empty[1]
        rows = self._rows[sequence][:, :, : self._counts[sequence]]
        return rows[0], rows[1]

    def forget(self, sequence: int) -> None:
        """A sequence ended."""
        self._rows.pop(sequence, None)
        self._counts.pop(sequence, None)

    @property
    def nbytes(self) -> int:
        """Bytes of all sequences."""
        return sum(rows.nbytes for rows in self._rows.values())
