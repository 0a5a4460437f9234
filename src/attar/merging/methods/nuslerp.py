"""NuSLERP: along the arc between two tensors, or between their task vectors; mergekit's own.

    t = w_1 / (w_0 + w_1) ,  u_i = x_i / max(|x_i|, 1e-7) ,  cos th = <u_0, u_1> in [-1, 1]
    y = (sin((1-t) th) x_0 + sin(t th) x_1) / sin th ,  (1-t) x_0 + t x_1 where |sin th| < 1e-8
    with a base: the same of x_i - base, plus base

Letters: x_i the models' tensors, as one vector, or, not flattened, as the vectors along the last dimension
(``nuslerp_row_wise``: along the first). In the tensors' dtype, as in mergekit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attar.kernels.threads import one_thread
from attar.merging.methods.common.chunked import norm

SHORT, PARALLEL, WEIGHTLESS = 1e-7, 1e-8, 1e-6


def nuslerp(
    tensors: Sequence[Tensor],
    base: Tensor | None = None,
    *,
    weight: Sequence[float],
    nuslerp_row_wise: bool = False,
    nuslerp_flatten: bool = True,
) -> Tensor:
    """The point on the arc at t.

    Args:
        tensors: x_0 and x_1.
        weight: two; a sum of 0 counts as equal weights.
        nuslerp_row_wise: not flattened: vectors along the first dimension.
        nuslerp_flatten: the whole tensor is one vector.
    """
    total = weight[0] + weight[1]
    t = weight[1] / total if abs(total) >= WEIGHTLESS else 0.5
    x0, x1 = tensors if base is None else [x.to(base.dtype) - base for x in tensors]
    if nuslerp_flatten:
        y = arc(x0.reshape(-1), x1.reshape(-1), t, dim=-1).view(x0.shape)
    else:
        y = arc(x0, x1, t, dim=0 if nuslerp_row_wise else -1)
    return y if base is None else base + y


def arc(x0: Tensor, x1: Tensor, t: float, dim: int) -> Tensor:
    """The points at t between the vectors of x0 and x1 along a dimension."""
    u0, u1 = (x / norm(x, dim).clamp(min=SHORT) for x in (x0, x1))
    with one_thread():
        cosine = u0.mul_(u1).sum(dim=dim, keepdim=True)
    del u0, u1
    th = torch.acos(cosine.clamp(-1, 1))
    sine = torch.sin(th)
    y = (torch.sin((1 - t) * th) * x0 + torch.sin(t * th) * x1) / sine
    return torch.where(sine.abs() < PARALLEL, (1 - t) * x0 + t * x1, y)
