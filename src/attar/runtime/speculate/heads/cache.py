"""Keys and values of the layers of a draft head, for the decided tokens of each sequence.

They are made of the target's hidden states and decided tokens alone, never of the head's own drafts, so a
position is written once, or again where its block was exchanged (``context.py``). The first positions are
missing where the target released their blocks before they were read: ``first`` says how many.

Letters: l layers of the head, n positions, f the first of them, K kv heads, d head dimension.
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
        self._rows: dict[int, Tensor] = {}  # (2, l, capacity, K, d), from position f on
        self._spans: dict[int, tuple[int, int]] = {}  # f and n

    def write(self, sequence: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Positions from ``start`` on (l, count, K, d); what was behind them is gone, and what was before
        them, if positions between are missing."""
        two, layers, kv_heads, head_dim = self.shape
        first, count = self._spans.get(sequence, (start, start))
        if not first <= start <= count:
            first = start
        begin, end = start - first, start - first + keys.shape[1]
        rows = self._rows.get(sequence)
        if rows is None or rows.shape[2] < end:
            grown = keys.new_zeros(two, layers, max(LEAST, 2 * end), kv_heads, head_dim)
            if rows is not None:
                grown[:, :, :begin] = rows[:, :, :begin]
            rows = self._rows[sequence] = grown
        rows[0, :, begin:end], rows[1, :, begin:end] = keys, values
        self._spans[sequence] = first, first + end

    def first(self, sequence: int) -> int:
        """f: the position of the first entry that ``read`` returns."""
        return self._spans.get(sequence, (0, 0))[0]

    def read(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Keys and values (l, n - f, K, d) of positions [f, n) of a sequence, views."""
        if sequence not in self._rows:
            two, layers, kv_heads, head_dim = self.shape
            empty = torch.zeros(two, layers, 0, kv_heads, head_dim)
            return empty[0], empty[1]
        first, stop = self._spans[sequence]
        rows = self._rows[sequence][:, :, : stop - first]
        return rows[0], rows[1]

    def before(self, sequence: int, position: int) -> tuple[Tensor, Tensor]:
        """Keys and values (l, n, K, d) of what a write from a position on will keep."""
        keys, values = self.read(sequence)
        count = position - self.first(sequence)
        count = count if 0 <= count <= keys.shape[1] else 0
        return keys[:, :count], values[:, :count]

    def forget(self, sequence: int) -> None:
        """A sequence ended."""
        self._rows.pop(sequence, None)
        self._spans.pop(sequence, None)

    @property
    def nbytes(self) -> int:
        """Bytes of all sequences."""
        return sum(rows.nbytes for rows in self._rows.values())
