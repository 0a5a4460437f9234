"""Methods over task vectors: sparsify each one, elect signs, sum.

    d_i = sparsify_i(x_i - base) ,  D_i = w_i d_i
    elected:   s = +1 where sum_i D_i >= 0, else -1 ;  M_i = [sign(D_i) = s]
               mix = sum_i M_i D_i ;  divisor = sum_i w_i M_i , 1 where that is 0
    else:      mix = sum_i D_i ;      divisor = sum_i w_i , 1 where |that| < 1e-8
    y = base + lambda (mix / divisor, or mix where not normalised)

Letters: x_i the models' tensors, w_i their weights, s the elected sign; n numbers of a tensor, m of a row.
All in base's dtype, each operation rounded to it, as in mergekit; a sum over the models is rounded once. With
``majority`` the signs are the paper's (Yadav et al. 2023): s = sign(sum_i d_i), without the weights, and
where that is 0 the majority's sign.

Sparsifiers of d = x - base:

    magnitude    the k = int(density n) largest |d|
    outliers     without the int(gamma n) largest, and without the smallest, so that int(density n) are kept
    random       each with probability density
    by_rank      each with a probability that grows with its rank in its row: density - epsilon for the
                 smallest |d| of the row ... density + epsilon for the largest

Rescaling multiplies the kept entries by R = sum |d| / sum |kept d| (L1, mergekit's) or by 1 / probability
(the papers'). A sparsifier is called with consecutive chunks of d and returns each one sparsified; it may
overwrite the chunk. Differs from mergekit: R is summed in float64 and rounded to d's dtype (mergekit sums in
d's dtype, in an order that depends on the number of threads).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attar.merging.methods.common.chunked import keep_, spans, total
from attar.merging.methods.common.random_masks import MaskSource
from attar.merging.methods.common.selection import StableSelection, kth_magnitudes

Sparsifier = Callable[[Tensor], Tensor]
TOO_SMALL = 1e-7  # an L1 sum below this is not divided by


@dataclass(frozen=True)
class TaskVector:
    """d = x - base, computed in chunks.

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

    def chunk(self, span: slice) -> Tensor:
        """d of a flat span, a new 1-D tensor."""
        return self.tensor.reshape(-1)[span].to(self.base.dtype) - self.base.reshape(-1)[span]

    def spans(self) -> Iterator[slice]:
        """Flat spans of whole rows."""
        return spans(self.count, self.row)

    def chunks(self) -> Iterator[Tensor]:
        return (self.chunk(span) for span in self.spans())


def task_vectors(tensors: Sequence[Tensor], base: Tensor) -> list[TaskVector]:
    """The models' task vectors."""
    return [TaskVector(tensor, base) for tensor in tensors]


def combine(
    vectors: Sequence[TaskVector],
    sparsifiers: Sequence[Sparsifier],
    *,
    weight: Sequence[float],
    normalize: bool,
    lambda_: float,
    elect: bool,
    majority: float | None = None,
) -> Tensor:
    """base + the combination of the sparsified task vectors, in chunks. Does not modify its inputs. Returns
    of base's shape and dtype.

    Args:
        vectors: of one base.
        normalize: divide by the weights that took part.
        lambda_: scale of the combination.
        majority: sign (+1 or -1) where the unweighted sum is 0; None: mergekit's weighted election.
    """
    base = vectors[0].base
    out = torch.empty(base.shape, dtype=base.dtype)
    w = torch.tensor(weight, dtype=base.dtype).view(-1, 1)
    for span in vectors[0].spans():
        d = torch.stack([sparsify(v.chunk(span)) for v, sparsify in zip(vectors, sparsifiers, strict=True)])
        if not elect:
            mix, divisor = (d * w).sum(0), _total_weight(w)
        elif majority is None:
            mix, divisor = elect_sign_weighted(d * w, w)
        else:
            mix, divisor = elect_sign_unweighted(d, w, majority)
        if normalize:
            mix /= divisor
        if lambda_ != 1:
            mix *= lambda_
        out.view(-1)[span] = mix.add_(base.reshape(-1)[span])
    return out


def elect_sign_weighted(D: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """mix (m,) and divisor (m,) for the sign of the weighted sum; a sum of 0 elects +1.

    Args:
        D: (n, m) weighted task vectors; overwritten.
        w: (n, 1) their weights.
    """
    s = D.sum(0).sign_().add_(0.5).sign_()  # of 0: +1
    agreeing = D.mul_(s).relu_()  # |D_i| where D_i agrees, else 0
    mix = agreeing.sum(0).mul_(s)
    return mix, _or_one(agreeing.sign_().mul_(w).sum(0))


def elect_sign_unweighted(d: Tensor, w: Tensor, majority: float) -> tuple[Tensor, Tensor]:
    """mix (m,) and divisor (m,) for the sign of the plain sum; a sum of 0 elects the majority's sign.

    Args:
        d: (n, m) task vectors; overwritten.
        w: (n, 1) weights of the mix.
        majority: +1 or -1.
    """
    s = d.sum(0).sign_()
    s.masked_fill_(s == 0, majority)
    agreeing = d.mul_(s).relu_()  # |d_i| where d_i agrees, else 0
    mix = (agreeing * w).sum(0).mul_(s)
    return mix, _or_one(agreeing.sign_().mul_(w).sum(0))


def _or_one(divisor: Tensor) -> Tensor:
    return divisor.masked_fill_(divisor == 0, 1)


def _total_weight(w: Tensor) -> Tensor:
    total = w.sum(0)
    return torch.ones_like(total) if total.abs() < 1e-8 else total


def rescaling(rescale: bool, compat: str) -> str:
    """How a random sparsifier makes up for dropped entries: "none", "l1" (mergekit), "probability"
    (paper)."""
    return "none" if not rescale else "probability" if compat == "paper" else "l1"


def keep_all(chunk: Tensor) -> Tensor:
    """Density 1."""
    return chunk


def magnitude(d: TaskVector, density: float, rescale: bool) -> Sparsifier:
    """The largest entries; at least one (mergekit fails where int(density n) is 0)."""
    if density >= 1 or not d.count:
        return keep_all
    k = max(int(density * d.count), 1)
    threshold = kth_magnitudes(d.chunks, d.base.dtype, [k])[0]
    return _rescaled(d, lambda: _masked(StableSelection(threshold, k, d.count, largest=True).mask), rescale)


def outliers(d: TaskVector, density: float, gamma: float, rescale: bool) -> Sparsifier:
    """The middle of the ascending order of |d|: indices [bottom, n - top).

    Differs from mergekit, which zeroes the whole tensor where int(gamma n) is 0: here no outlier is dropped.
    """
    if density >= 1 or not d.count:
        return keep_all
    n = d.count
    keep, top = int(density * n), int(gamma * n)
    bottom = n - keep - top
    if bottom < 0:
        top, bottom = top + bottom, 0
    # the p-th smallest entry (from 1) is the (n + 1 - p)-th largest
    ranks = [n + 1 - p for p in (bottom, n - top) if p > 0]
    thresholds = kth_magnitudes(d.chunks, d.base.dtype, ranks)

    def start() -> Sparsifier:
        below = StableSelection(thresholds[0], bottom, n, largest=False) if bottom else None
        up_to = StableSelection(thresholds[-1], n - top, n, largest=False)
        return _masked(lambda p: up_to.mask(p) & ~below.mask(p) if below else up_to.mask(p))

    return _rescaled(d, start, rescale)


def random(d: TaskVector, density: float, masks: MaskSource, rescale: str) -> Sparsifier:
    """DARE.

    Args:
        rescale: "none", "l1" (mergekit) or "probability" (paper: 1 / density).
    """
    if density >= 1:
        return keep_all
    packed = [pack_mask(masks.below(density, span.stop - span.start)) for span in d.spans()]
    if rescale == "probability":
        return _stored(packed, lambda chunk: chunk / density)
    return _rescaled(d, lambda: _stored(packed), rescale == "l1")


def by_rank(d: TaskVector, density: float, epsilon: float, masks: MaskSource, rescale: str) -> Sparsifier:
    """DELLA; a row of one number is kept with probability density (mergekit: NaN).

    Args:
        rescale: "none", "l1" (mergekit) or "probability" (paper: 1 / p of each entry).
    """
    if density >= 1:
        return keep_all

    def p(chunk: Tensor) -> Tensor:
        return rank_probability(chunk.view(-1, d.row), density, epsilon).view(-1)

    packed = [pack_mask(masks.below(p(chunk), chunk.numel())) for chunk in d.chunks()]
    if rescale == "probability":
        return _stored(packed, lambda chunk: chunk / p(chunk))
    return _rescaled(d, lambda: _stored(packed), rescale == "l1")


def rank_probability(rows: Tensor, density: float, epsilon: float) -> Tensor:
    """p = density - epsilon + 2 epsilon (r - 1) / (m - 1), r = 1 ... m the rank of |d|; float32 (rows, m)."""
    m = rows.shape[-1]
    if m == 1:
        return torch.full(rows.shape, density)
    order = rows.abs().float().argsort(dim=-1, stable=True)
    steps = (density - epsilon) + torch.arange(m, dtype=torch.float32) * (2 * epsilon / (m - 1))
    return torch.empty(rows.shape).scatter_(-1, order, steps.expand(rows.shape))


def _masked(mask: Callable[[Tensor], Tensor]) -> Sparsifier:
    return lambda chunk: keep_(chunk, mask(chunk))


def pack_mask(mask: Tensor) -> bytes:
    """A bool mask, eight entries a byte."""
    return np.packbits(mask.numpy()).tobytes()


def unpack_mask(packed: bytes, count: int) -> Tensor:
    """The bool mask (count,)."""
    return torch.from_numpy(np.unpackbits(np.frombuffer(packed, np.uint8), count=count).view(bool))


def _stored(packed: Sequence[bytes], scale: Callable[[Tensor], Tensor] = keep_all) -> Sparsifier:
    """Packed masks of consecutive chunks."""
    masks = iter(packed)
    return lambda chunk: keep_(scale(chunk), unpack_mask(next(masks), chunk.numel()))


def _rescaled(d: TaskVector, start: Callable[[], Sparsifier], rescale: bool) -> Sparsifier:
    """The sparsifier that ``start`` makes, times R."""
    if not rescale:
        return start()
    sparsifier, before, after = start(), 0.0, 0.0
    for chunk in d.chunks():
        before += total(chunk.abs())
        after += total(sparsifier(chunk).abs())
    sparsifier = start()
    if min(before, after) < TOO_SMALL:
        return sparsifier
    R = torch.tensor(before).to(d.base.dtype) / torch.tensor(after).to(d.base.dtype)
    return lambda chunk: sparsifier(chunk).mul_(R)
