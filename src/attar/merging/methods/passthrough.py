"""Passthrough: one model's tensor, as it is or scaled. Stacks layers of several models into one.

y = x   or   scale x
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from attar.merging.methods.common.chunked import elementwise


def passthrough(tensors: Sequence[Tensor], base: None = None, *, scale: Sequence[float | None]) -> Tensor:
    """The tensor times the scale; without a scale the tensor itself, not a copy."""
    (x,), (factor,) = tensors, scale
    return x if factor is None else elementwise(lambda chunk: chunk * factor, [x])
