"""Exact selection by magnitude without sorting: the k-th largest |x|, read from the bits of the numbers.

    |x| < |y|   <=>   bits(|x|) < bits(|y|)      as integers, for floats of one format

A histogram of the upper 15 bits (without the sign) tells in which of 32,768 bins the k-th largest lies. For
bfloat16 and float16 that is the number itself; for float32 a second pass counts the lower 16 bits inside that
bin. A pass costs about a nanosecond a number, and the numbers may come in chunks and from many tensors.

Ties: a stable sort keeps equal numbers in their order. :class:`StableSelection` marks exactly the entries
that such a sort would put first. NaN counts as larger than infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attar.merging.methods.common.chunked import spans

BINS, LOW = 1 << 15, 1 << 16


def magnitude_bits(values: Tensor) -> Tensor:
    """The bit patterns of |values| as int16 or int32: integers in the order of the magnitudes."""
    return values.abs().view(torch.int32 if values.dtype == torch.float32 else torch.int16)


@dataclass(frozen=True)
class MagnitudeThreshold:
    """The k-th largest magnitude: its bits, and how many numbers are larger and equal."""

    bits: int
    above: int
    equal: int
    dtype: torch.dtype

    @property
    def value(self) -> float:
        """The magnitude itself."""
        integer = torch.int32 if self.dtype == torch.float32 else torch.int16
        return float(torch.tensor([self.bits], dtype=integer).view(self.dtype))


class MagnitudeSelector:
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
        self.thresholds: list[MagnitudeThreshold] = []
        self.done = False

    @property
    def count(self) -> int:
        """How many numbers the first pass counted."""
        return int(self.high.sum())

    def add(self, values: Tensor) -> None:
        """Count a chunk, of any shape, in the current pass."""
        bits = magnitude_bits(values).reshape(-1)
        if not self.thresholds:
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
        if not self.thresholds:
            self.thresholds = [_in_histogram(high, k, self.dtype) for k in ranks]
            self.done = self.passes == 1
            self.low = {} if self.done else {t.bits: np.zeros(LOW, np.int64) for t in self.thresholds}
            return
        self.done = True
        self.thresholds = [
            _refine(outer, self.low[outer.bits], k) for outer, k in zip(self.thresholds, ranks, strict=True)
        ]


def _in_histogram(counts: np.ndarray, k: int, dtype: torch.dtype) -> MagnitudeThreshold:
    """The bin of the k-th largest entry of a histogram."""
    from_top = np.cumsum(counts[::-1])
    bins_above = int(np.searchsorted(from_top, k))
    index = counts.size - 1 - bins_above
    return MagnitudeThreshold(index, int(from_top[bins_above] - counts[index]), int(counts[index]), dtype)


def _refine(outer: MagnitudeThreshold, counts: np.ndarray, k: int) -> MagnitudeThreshold:
    """The k-th largest inside a bin of the upper bits."""
    inner = _in_histogram(counts, k - outer.above, outer.dtype)
    bits = (outer.bits << 16) | inner.bits
    return MagnitudeThreshold(bits, outer.above + inner.above, inner.equal, outer.dtype)


def kth_magnitudes(
    chunks: Callable[[], Iterable[Tensor]], dtype: torch.dtype, ranks: Sequence[int]
) -> list[MagnitudeThreshold]:
    """The k-th largest magnitudes, one for each rank; ``chunks`` is called once for each pass."""
    selector = MagnitudeSelector(dtype)
    for _ in range(selector.passes):
        for chunk in chunks():
            selector.add(chunk)
        selector.end_pass(ranks)
    return selector.thresholds


def kth_largest(values: Tensor, k: int) -> float:
    """The k-th largest magnitude of a tensor, k = 1 ... its size."""
    flat = values.reshape(-1)
    return kth_magnitudes(lambda: (flat[span] for span in spans(flat.numel())), values.dtype, [k])[0].value


class StableSelection:
    """Marks, chunk by chunk, the entries that a stable sort by magnitude puts first.

    Args:
        threshold: of the last entry that is marked.
        count: how many are marked.
        size: how many numbers there are.
        largest: sorted in descending order; else ascending.
    """

    def __init__(self, threshold: MagnitudeThreshold, count: int, size: int, *, largest: bool) -> None:
        self.bits = threshold.bits
        self.largest = largest
        beyond = threshold.above if largest else size - threshold.above - threshold.equal
        self.ties_left = count - beyond
        self.all_ties = self.ties_left == threshold.equal

    def mask(self, values: Tensor) -> Tensor:
        """Bool, of the next chunk's shape (1-D)."""
        bits = magnitude_bits(values)
        if self.all_ties or self.ties_left:
            marked = bits >= self.bits if self.largest else bits <= self.bits
            if not self.all_ties:
                self._unmark_late_ties(marked, bits)
            return marked
        return bits > self.bits if self.largest else bits < self.bits

    def _unmark_late_ties(self, marked: Tensor, bits: Tensor) -> None:
        ties = bits == self.bits
        count = int(torch.count_nonzero(ties))
        if count > self.ties_left:
            marked[ties.nonzero().flatten()[self.ties_left :]] = False
        self.ties_left = max(self.ties_left - count, 0)


def largest(values: Tensor, k: int) -> Tensor:
    """A bool mask of the values' shape: the k largest magnitudes, k = 0 ... size; of equal ones the first."""
    flat = values.reshape(-1)
    mask = torch.zeros(flat.numel(), dtype=torch.bool)
    if k > 0:
        all_spans = list(spans(flat.numel()))
        threshold = kth_magnitudes(lambda: (flat[span] for span in all_spans), values.dtype, [k])[0]
        selection = StableSelection(threshold, k, flat.numel(), largest=True)
        for span in all_spans:
            mask[span] = selection.mask(flat[span])
    return mask.view(values.shape)
