"""Nearswap: alchemonaut 2024, the model card of QuartetAnemoi-70B: towards another model where both are
close.

    q = clamp(t / max(|x - base|, 1e-6), 0, 1) ,  y = q x + (1 - q) base

In base's dtype, as in mergekit.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from attar.merging.methods.common.chunked import elementwise

CLOSE = 1e-6


def nearswap(tensors: Sequence[Tensor], base: Tensor, *, t: float) -> Tensor:
    """The base, moved to the other model where the distance is up to t.

    Args:
        tensors: one.
        base: kept where the distance is large.
        t: the distance up to which the other model's number is used unchanged.
    """

    def towards(a: Tensor, b: Tensor) -> Tensor:
        b = b.to(a.dtype)
        q = (t / (a - b).abs_().clamp_(min=CLOSE)).clamp_(0, 1)
        return q * b + (1 - q) * a

    return elementwise(towards, [base, tensors[0]])
