"""Sparsifiers of a task vector d = x - base: which entries stay, piece by piece.

    magnitude    the k = int(density n) largest |d|
    outliers     without the int(gamma n) largest, and without the smallest, so that int(density n) stay
    random       each with probability density
    by_rank      each with a probability that grows with its rank in its row: density - epsilon for the
                 smallest |d| of the row ... density + epsilon for the largest

Rescaling multiplies what stays by R = sum |d| / sum |what stays| (L1, mergekit's) or by 1 / probability (the
papers'). Letters: n numbers of the tensor, m of a row.

A sparsifier is called with consecutive pieces of d and returns each one sparsified; it may reuse the
piece's memory. Differs from mergekit: R is summed in float64 and rounded to d's dtype (there the sums are
of d's dtype, in an order that depends on the number of threads).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attar.merging.methods.common.chunked import keep_, spans, total
from attar.merging.methods.common.random_masks import Source
from attar.merging.methods.common.selection import First, cuts

Sparsifier = Callable[[Tensor], Tensor]
TOO_SMALL = 1e-7  # an L1 sum below this is not divided by


@dataclass(frozen=True)
class TaskVector:
    """d = x - base, never held as a whole.

    Args:
        tensor: x, cast to base's dtype.
        base: of the same shape.
    """

    tensor: Tensor
    base: Tensor

    @property
    def count(self) -> int:
        return int(self.base.numel())

    @property
    def row(self) -> int:
        """Numbers in a row: of the last dimension."""
        return max(int(self.base.shape[-1]), 1) if self.base.dim() else 1

    def piece(self, span: slice) -> Tensor:
        """d of a flat span, 1-D, newly made."""
        return self.tensor.reshape(-1)[span].to(self.base.dtype) - self.base.reshape(-1)[span]

    def pieces(self) -> Iterator[Tensor]:
        return (self.piece(span) for span in spans(self.count, self.row))


def rescaling(rescale: bool, compat: str) -> str:
    """How a random sparsifier makes up for what it drops: "none", "l1" (mergekit), "probability" (paper)."""
    return "none" if not rescale else "probability" if compat == "paper" else "l1"


def keep_all(piece: Tensor) -> Tensor:
    """Density 1."""
    return piece


def magnitude(d: TaskVector, density: float, rescale: bool) -> Sparsifier:
    """The largest entries; at least one (mergekit stops where int(density n) is 0)."""
    if density >= 1 or not d.count:
        return keep_all
    k = max(int(density * d.count), 1)
    cut = cuts(d.pieces, d.base.dtype, [k])[0]
    return _rescaled(d, lambda: _masked(First(cut, k, d.count, largest=True).mask), rescale)


def outliers(d: TaskVector, density: float, gamma: float, rescale: bool) -> Sparsifier:
    """The middle of the ascending order of |d|: places [bottom, n - top).

    Differs from mergekit, which zeroes the whole tensor where int(gamma n) is 0: here no outlier is dropped.
    """
    if density >= 1 or not d.count:
        return keep_all
    n = d.count
    keep, top = int(density * n), int(gamma * n)
    bottom = n - keep - top
    if bottom < 0:
        top, bottom = top + bottom, 0
    # the entry at ascending place p (from 1) is the (n + 1 - p)-th largest
    ranks = [n + 1 - place for place in (bottom, n - top) if place > 0]
    found = cuts(d.pieces, d.base.dtype, ranks)

    def start() -> Sparsifier:
        below = First(found[0], bottom, n, largest=False) if bottom else None
        up_to = First(found[-1], n - top, n, largest=False)
        return _masked(lambda p: up_to.mask(p) & ~below.mask(p) if below else up_to.mask(p))

    return _rescaled(d, start, rescale)


def random(d: TaskVector, density: float, draws: Source, rescale: str) -> Sparsifier:
    """DARE.

    Args:
        rescale: "none", "l1" (mergekit) or "probability" (paper: 1 / density).
    """
    if density >= 1:
        return keep_all
    masks = [packed(draws.below(density, span.stop - span.start)) for span in spans(d.count, d.row)]
    if rescale == "probability":
        return _stored(masks, lambda piece: piece / density)
    return _rescaled(d, lambda: _stored(masks), rescale == "l1")


def by_rank(d: TaskVector, density: float, epsilon: float, draws: Source, rescale: str) -> Sparsifier:
    """DELLA; a row of one number is kept with probability density (mergekit: NaN).

    Args:
        rescale: "none", "l1" (mergekit) or "probability" (paper: 1 / p of each entry).
    """
    if density >= 1:
        return keep_all

    def p(piece: Tensor) -> Tensor:
        return rank_probability(piece.view(-1, d.row), density, epsilon).view(-1)

    masks = [packed(draws.below(p(piece), piece.numel())) for piece in d.pieces()]
    if rescale == "probability":
        return _stored(masks, lambda piece: piece / p(piece))
    return _rescaled(d, lambda: _stored(masks), rescale == "l1")


def rank_probability(rows: Tensor, density: float, epsilon: float) -> Tensor:
    """p = density - epsilon + 2 epsilon (r - 1) / (m - 1), r = 1 ... m the rank of |d|; float32 (rows, m)."""
    m = rows.shape[-1]
    if m == 1:
        return torch.full(rows.shape, density)
    order = rows.abs().float().argsort(dim=-1, stable=True)
    steps = (density - epsilon) + torch.arange(m, dtype=torch.float32) * (2 * epsilon / (m - 1))
    return torch.empty(rows.shape).scatter_(-1, order, steps.expand(rows.shape))


def _masked(mask: Callable[[Tensor], Tensor]) -> Sparsifier:
    return lambda piece: keep_(piece, mask(piece))


def packed(mask: Tensor) -> bytes:
    """A bool mask at eight entries a byte."""
    return np.packbits(mask.numpy()).tobytes()


def unpacked(mask: bytes, count: int) -> Tensor:
    """The bool mask (count,) that was packed."""
    return torch.from_numpy(np.unpackbits(np.frombuffer(mask, np.uint8), count=count).view(bool))


def _stored(masks: Sequence[bytes], scale: Callable[[Tensor], Tensor] = keep_all) -> Sparsifier:
    """Masks of consecutive pieces."""
    rest = iter(masks)
    return lambda piece: keep_(scale(piece), unpacked(next(rest), piece.numel()))


def _rescaled(d: TaskVector, start: Callable[[], Sparsifier], rescale: bool) -> Sparsifier:
    """The sparsifier that ``start`` makes, times R."""
    if not rescale:
        return start()
    sparsifier, before, after = start(), 0.0, 0.0
    for piece in d.pieces():
        before += total(piece.abs())
        after += total(sparsifier(piece).abs())
    sparsifier = start()
    if min(before, after) < TOO_SMALL:
        return sparsifier
    R = torch.tensor(before).to(d.base.dtype) / torch.tensor(after).to(d.base.dtype)
    return lambda piece: sparsifier(piece).mul_(R)
