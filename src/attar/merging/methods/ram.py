"""RAM: Yuan et al. 2026, "Behavior Knowledge Merge in Reinforced Agentic Models", arXiv 2601.13572.

    d_i = x_i - base ,  A_i = [|d_i| > epsilon] ,  c = sum_i A_i
    shared (c > 1): mean of the active d_i ;  unique (c = 1): the one active d_i, times f_i
    y = base + that ,  base where c = 0
    ram: f_i = 1 ;  ramplus_tl: f_i = 1 + r clamp(shared_i / unique_i, 0, alpha)

Letters: A_i which entries model i changed ("active"), c how many models did; shared_i, unique_i the numbers
of i's active entries that others changed too, or not. Counts are of the tensor, as in mergekit; the paper's
are of the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attar.merging.methods.common.chunked import elementwise, keep_, spans


def ram(tensors: Sequence[Tensor], base: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    """The mean over the models that changed an entry.

    Args:
        epsilon: a change of up to this counts as none.
    """
    return _merge(tensors, base, epsilon, None)


def ramplus_tl(
    tensors: Sequence[Tensor], base: Tensor, *, r: float = 0.1, alpha: float = 0.2, epsilon: float = 1e-5
) -> Tensor:
    """:func:`ram`, with the entries that one model alone changed made larger.

    Args:
        r: factor of shared_i / unique_i.
        alpha: bound of shared_i / unique_i.
    """
    return _merge(tensors, base, epsilon, unique_scales(tensors, base, r, alpha, epsilon))


def unique_scales(
    tensors: Sequence[Tensor], base: Tensor, r: float, alpha: float, epsilon: float
) -> list[float]:
    """f_i of each model; 1 where it has no unique entry."""
    unique = [0] * len(tensors)
    shared = [0] * len(tensors)
    flat, w0 = [x.reshape(-1) for x in tensors], base.reshape(-1)
    for span in spans(w0.numel()):
        A = torch.stack([(x[span].to(w0.dtype) - w0[span]).abs_() > epsilon for x in flat])
        others = A.sum(0) > 1
        for i, active in enumerate(A):
            both = int((active & others).sum())
            shared[i] += both
            unique[i] += int(active.sum()) - both
    return [1 + r * min(s / u, alpha) if u else 1.0 for s, u in zip(shared, unique, strict=True)]


def _merge(tensors: Sequence[Tensor], base: Tensor, epsilon: float, scales: Sequence[float] | None) -> Tensor:
    f = None if scales is None else torch.tensor(scales, dtype=torch.float32).view(-1, 1)

    def merge(w0: Tensor, *xs: Tensor) -> Tensor:
        d = torch.stack([x.to(w0.dtype) - w0 for x in xs])
        active = d.abs() > epsilon
        count = active.to(d.dtype).sum(0)
        parts = keep_(d, active).div_(count.clamp(min=1))
        if f is not None:
            parts = torch.where(count == 1, parts * f, parts.float())
        return w0 + parts.sum(0)

    return elementwise(merge, [base, *tensors])
