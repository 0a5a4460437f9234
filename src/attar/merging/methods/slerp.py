"""SLERP: along the arc between two tensors, Shoemake 1985, "Animating rotation with quaternion curves".

    u_i = x_i / |x_i| ,  cos th = <u_0, u_1>
    y = sin((1-t) th) / sin th  x_0  +  sin(t th) / sin th  x_1

Letters: x_0 the base's tensor, x_1 the other's, each as one vector; t = 0 is the base. Computed in float32,
the result has the base's dtype.

mergekit's form interpolates linearly where |cos th| > 0.9995, opposite directions included. The paper's
form clamps the cosine, takes the arc up to |sin th| = 1e-6 and refuses opposite directions, between which
there is no single arc.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attar.errors import NumericsError
from attar.kernels.threads import one_thread
from attar.merging.methods.common.chunked import FEW, elementwise, inner_product, norm

NEARLY_PARALLEL = 0.9995
TINY = 1e-8


def slerp(tensors: Sequence[Tensor], base: Tensor, *, t: float, compat: str = "mergekit") -> Tensor:
    """The point at t on the arc from ``base`` to the tensor.

    Args:
        tensors: x_1 alone.
        t: 0 is the base, 1 the other model.

    Raises:
        NumericsError: compat "paper" and opposite directions.
    """
    (x1,) = tensors
    cosine = cosine_of(base, x1)
    s0, s1 = shares(cosine, t) if compat == "mergekit" else shares_paper(float(cosine), t)
    return elementwise(lambda a, b: (a.float() * s0).add_(b.float() * s1), [base, x1], base.dtype)


def cosine_of(a: Tensor, b: Tensor) -> Tensor:
    """<u_0, u_1> in float32, a scalar; a vector of norm up to 1e-8 is its own u.

    Large tensors in float64, as in :func:`~attar.merging.methods.common.chunked.norm`; small ones with
    mergekit's operations.
    """
    lengths = [norm(x, dtype=torch.float32) for x in (a, b)]
    m, n = (length if length > TINY else torch.ones(()) for length in lengths)
    if a.numel() > FEW:
        return torch.tensor(inner_product(a, b) / (float(m) * float(n)), dtype=torch.float32)
    with one_thread():
        return ((a.float() / m) * (b.float() / n)).sum()


def shares(cosine: Tensor, t: float) -> tuple[float, float]:
    """The coefficients of x_0 and x_1, in float32 as in mergekit."""
    if cosine.abs() > NEARLY_PARALLEL:
        return float(1 - torch.tensor(t)), t
    th = torch.arccos(cosine)
    return float(torch.sin((1 - torch.tensor(t)) * th) / torch.sin(th)), float(
        torch.sin(t * th) / torch.sin(th)
    )


def shares_paper(cosine: float, t: float) -> tuple[float, float]:
    """The coefficients of x_0 and x_1, in float64."""
    th = math.acos(min(max(cosine, -1.0), 1.0))
    if math.sin(th) > 1e-6:
        return math.sin((1 - t) * th) / math.sin(th), math.sin(t * th) / math.sin(th)
    if cosine < 0:
        raise NumericsError("slerp between opposite directions: there is no single arc", hint="use linear")
    return 1 - t, t
