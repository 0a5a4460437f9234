"""Exact selection by magnitude without sorting: the k-th largest |x|, found in the bits of the numbers.

    |x| < |y|   <=>   bits(|x|) < bits(|y|)      as integers, for floats of one format

So the histogram of the upper 15 bits (the sign is gone) says in which of 32,768 bins the k-th largest lies.
For bfloat16 and float16 that is the number itself; for float32 a second pass counts the lower 16 bits
inside that bin. A pass costs about a nanosecond a number, and the numbers may come in pieces and from many
tensors.

Ties: a stable sort puts equal numbers in the order of their places. :class:`First` marks exactly the entries
that such a sort would put first. NaN counts as larger than infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from attar.merging.methods.common.chunked import spans

BINS, LOW = 1 << 15, 1 << 16


class Scan(Protocol):
    """What must be known of the whole model before its first tensor can be merged.

    ``for _ in range(scan.passes)``: ``add`` every output tensor's inputs, then ``end_pass``; at last
    ``finish`` gives keywords for the method's function. The order of the tensors does not matter.
    """

    passes: int

    def add(self, tensors: Sequence[Tensor], base: Tensor) -> None: ...

    def end_pass(self) -> None: ...

    def finish(self) -> Mapping[str, Any]: ...


def magnitude_bits(values: Tensor) -> Tensor:
    """The bit patterns of |values| as int16 or int32: integers in the order of the magnitudes."""
    return values.abs().view(torch.int32 if values.dtype == torch.float32 else torch.int16)


@dataclass(frozen=True)
class Cut:
    """The k-th largest magnitude: its bits, and how many numbers lie above and on it."""

    bits: int
    above: int
    equal: int
    dtype: torch.dtype

    @property
    def value(self) -> float:
        """The magnitude itself."""
        integer = torch.int32 if self.dtype == torch.float32 else torch.int16
        return float(torch.tensor([self.bits], dtype=integer).view(self.dtype))


class Selector:
    """Counts magnitudes, pass by pass, until the k-th largest is known.

    Args:
        dtype: of all values: float32 (two passes), bfloat16 or float16 (one).
    """

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"selection among {dtype} is not possible")
        self.dtype = dtype
        self.passes = 2 if dtype == torch.float32 else 1
        self.high = torch.zeros(BINS, dtype=torch.int64)
        self.low: dict[int, np.ndarray] = {}
        self.cuts: list[Cut] = []
        self.done = False

    @property
    def count(self) -> int:
        """How many numbers the first pass saw."""
        return int(self.high.sum())

    def add(self, values: Tensor) -> None:
        """Count a piece, of any shape, in the present pass."""
        bits = magnitude_bits(values).reshape(-1)
        if not self.cuts:
            self.high += torch.bincount(bits >> 16 if self.passes == 2 else bits, minlength=BINS)
            return
        array = bits.numpy()
        for bucket, counts in self.low.items():
            inside = array[(array >> 16) == bucket]
            counts += np.bincount(inside & (LOW - 1), minlength=LOW)

    def end_pass(self, ranks: Sequence[int]) -> None:
        """End a pass.

        Args:
            ranks: the k of every k-th largest wanted, 1 (the largest) ... count; the same in each pass.
        """
        high = self.high.numpy()
        if not self.cuts:
            self.cuts = [_cut(high, k, self.dtype) for k in ranks]
            self.done = self.passes == 1
            self.low = {} if self.done else {cut.bits: np.zeros(LOW, np.int64) for cut in self.cuts}
            return
        self.done = True
        self.cuts = [
            _refine(outer, self.low[outer.bits], k) for outer, k in zip(self.cuts, ranks, strict=True)
        ]


def _cut(counts: np.ndarray, k: int, dtype: torch.dtype) -> Cut:
    """The bin of the k-th largest entry of a histogram."""
    from_top = np.cumsum(counts[::-1])
    place = int(np.searchsorted(from_top, k))
    index = counts.size - 1 - place
    return Cut(index, int(from_top[place] - counts[index]), int(counts[index]), dtype)


def _refine(outer: Cut, counts: np.ndarray, k: int) -> Cut:
    """The k-th largest inside a bin of the upper bits."""
    inner = _cut(counts, k - outer.above, outer.dtype)
    return Cut((outer.bits << 16) | inner.bits, outer.above + inner.above, inner.equal, outer.dtype)


def cuts(pieces: Callable[[], Iterable[Tensor]], dtype: torch.dtype, ranks: Sequence[int]) -> list[Cut]:
    """The k-th largest magnitudes of numbers given in pieces, as often as they are asked for."""
    selector = Selector(dtype)
    for _ in range(selector.passes):
        for piece in pieces():
            selector.add(piece)
        selector.end_pass(ranks)
    return selector.cuts


def kth_largest(values: Tensor, k: int) -> float:
    """The k-th largest magnitude of a tensor, k = 1 ... its size."""
    flat = values.reshape(-1)
    return cuts(lambda: (flat[span] for span in spans(flat.numel())), values.dtype, [k])[0].value


class First:
    """Marks, piece by piece, the entries that a stable sort by magnitude puts first.

    Args:
        cut: of the last entry that is marked.
        count: how many are marked.
        size: how many numbers there are.
        largest: sorted in descending order; else ascending.
    """

    def __init__(self, cut: Cut, count: int, size: int, *, largest: bool) -> None:
        self.bits = cut.bits
        self.largest = largest
        self.left = count - (cut.above if largest else size - cut.above - cut.equal)  # of those on the cut
        self.all = self.left == cut.equal

    def mask(self, values: Tensor) -> Tensor:
        """Bool, of the next piece's shape (1-D)."""
        bits = magnitude_bits(values)
        if self.all or self.left:
            marked = bits >= self.bits if self.largest else bits <= self.bits
            if not self.all:
                self._drop_late_ties(marked, bits)
            return marked
        return bits > self.bits if self.largest else bits < self.bits

    def _drop_late_ties(self, marked: Tensor, bits: Tensor) -> None:
        on_cut = bits == self.bits
        count = int(torch.count_nonzero(on_cut))
        if count > self.left:
            marked[on_cut.nonzero().flatten()[self.left :]] = False
        self.left = max(self.left - count, 0)


def largest(values: Tensor, k: int) -> Tensor:
    """A bool mask of the values' shape: the k largest magnitudes, k = 0 ... size; of equal ones the first."""
    flat = values.reshape(-1)
    mask = torch.zeros(flat.numel(), dtype=torch.bool)
    if k > 0:
        all_spans = list(spans(flat.numel()))
        cut = cuts(lambda: (flat[span] for span in all_spans), values.dtype, [k])[0]
        first = First(cut, k, flat.numel(), largest=True)
        for span in all_spans:
            mask[span] = first.mask(flat[span])
    return mask.view(values.shape)
