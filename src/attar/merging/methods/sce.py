"""SCE: Wan, Zhong, Yang, Chen, Quan 2024, "FuseChat: Knowledge fusion of chat models", arXiv 2408.07990,
section 3.3: select, calculate, erase.

    select:     d_i = x_i - base where the variance over the models is one of the largest
                k = int(select_topk nnz), else 0
    calculate:  v_i = mean(d_i^2) / sum_j mean(d_j^2) ,  1/N where that sum < 1e-6
    erase:      s = +1 where sum_i d_i >= 0, else -1 ;  M_i = [sign(d_i) = s]
    y = base + sum_i v_i M_i d_i / max(sum_i v_i M_i, 1e-6)

Letters: N models, x_i their tensors, d_i their task vectors, nnz the entries whose variance is not 0. Per
tensor, in base's dtype, as in mergekit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attar.kernels.threads import one_thread
from attar.merging.methods.common.chunked import elementwise
from attar.merging.methods.common.selection import largest

SMALL = 1e-6


def sce(
    tensors: Sequence[Tensor], base: Tensor, *, int8_mask: bool = False, select_topk: float = 1.0
) -> Tensor:
    """Select, calculate, erase.

    Args:
        select_topk: share of the entries that is merged; the others are the base's.
    """
    mask = torch.ones(base.shape, dtype=torch.bool)
    if select_topk < 1:
        variance = elementwise(_variance, [base, *tensors])
        mask = largest(variance, int(int(torch.count_nonzero(variance)) * select_topk))
    v = shares([_mean_square(x, base, mask) for x in tensors])

    def merge(w0: Tensor, kept: Tensor, *xs: Tensor) -> Tensor:
        d = _stack(w0, xs).mul_(kept)
        s = d.sum(0).sign_().add_(0.5).sign_()  # of 0: +1
        w = (d * s).relu_().sign_().mul_(v)
        return w0 + (d * w).sum(0) / w.sum(0).clamp(min=SMALL)

    return elementwise(merge, [base, mask, *tensors])


def shares(squares: Sequence[Tensor]) -> Tensor:
    """v (N, 1): each model's part in the sum of the mean squares."""
    v = torch.stack(list(squares)).view(-1, 1)
    total = v.sum()
    return torch.full_like(v, 1 / len(v)) if total.abs() < SMALL else v / total


def _mean_square(x: Tensor, base: Tensor, mask: Tensor) -> Tensor:
    """mean(d^2) of a masked task vector; needs one tensor of squares."""
    squares = elementwise(lambda w0, b, kept: (b.to(w0.dtype) - w0).mul_(kept).square_(), [base, x, mask])
    with one_thread():
        return squares.mean()


def _variance(w0: Tensor, *xs: Tensor) -> Tensor:
    return _stack(w0, xs).var(dim=0, unbiased=False)


def _stack(w0: Tensor, xs: Sequence[Tensor]) -> Tensor:
    return torch.stack([x.to(w0.dtype) - w0 for x in xs])
