"""What the methods over task vectors share: weights, the vote on signs, the sum.

    d_i = sparsify_i(x_i - base) ,  D_i = w_i d_i
    vote:      s = +1 where sum_i D_i >= 0, else -1 ;  M_i = [sign(D_i) = s]
               mix = sum_i M_i D_i ;  divisor = sum_i w_i M_i , 1 where that is 0
    no vote:   mix = sum_i D_i ;      divisor = sum_i w_i , 1 where |that| < 1e-8
    y = base + lambda (mix / divisor, or mix where not normalised)

Letters: x_i the models' tensors, w_i their weights, s the elected sign. All in base's dtype, each operation
rounded to it, as in mergekit; a sum over the models is rounded once.

With ``majority`` the vote is the paper's (Yadav et al. 2023): s = sign(sum_i d_i), without the weights, and
where that is 0 the majority's sign.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attar.merging.methods.common.chunked import spans
from attar.merging.methods.common.task_vectors import Sparsifier, TaskVector


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
    vote: bool,
    majority: float | None = None,
) -> Tensor:
    """base + the combination of the sparsified task vectors, piece by piece. Does not modify its inputs.

    Args:
        vectors: of one base.
        sparsifiers: one for each.
        weight: one for each.
        normalize: divide by the weights that took part.
        lambda_: scale of the combination.
        vote: whether signs are elected.
        majority: sign (+1 or -1) for a vote of 0, and the vote is unweighted; None: mergekit's vote.

    Returns:
        Of base's shape and dtype.
    """
    base = vectors[0].base
    out = torch.empty(base.shape, dtype=base.dtype)
    w = torch.tensor(weight, dtype=base.dtype).view(-1, 1)
    for span in spans(vectors[0].count, vectors[0].row):
        d = torch.stack([sparsify(v.piece(span)) for v, sparsify in zip(vectors, sparsifiers, strict=True)])
        if vote:
            mix, divisor = vote_of_weights(d * w, w) if majority is None else vote_of_heads(d, w, majority)
        else:
            mix, divisor = (d * w).sum(0), _total_weight(w)
        if normalize:
            mix /= divisor
        if lambda_ != 1:
            mix *= lambda_
        out.view(-1)[span] = mix.add_(base.reshape(-1)[span])
    return out


def vote_of_weights(D: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The sign of the weighted sum wins; a sum of 0 elects +1.

    Args:
        D: (n, m) weighted task vectors; overwritten.
        w: (n, 1) their weights.

    Returns:
        mix (m,), divisor (m,).
    """
    s = D.sum(0).sign_().add_(0.5).sign_()  # of 0: +1
    agreeing = D.mul_(s).relu_()  # |D_i| where D_i agrees, else 0
    mix = agreeing.sum(0).mul_(s)
    return mix, _or_one(agreeing.sign_().mul_(w).sum(0))


def vote_of_heads(d: Tensor, w: Tensor, majority: float) -> tuple[Tensor, Tensor]:
    """The sign of the plain sum wins; a sum of 0 elects the majority's sign.

    Args:
        d: (n, m) task vectors; overwritten.
        w: (n, 1) weights of the sum.
        majority: +1 or -1.

    Returns:
        mix (m,), divisor (m,).
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
