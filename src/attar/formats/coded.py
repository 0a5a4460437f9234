"""A weight as codes, free of any layout: what the writers take and the readers of integer formats give."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Coded:
    """A weight as codes, the way every layout sees it.

    Attributes:
        codes: (N, K): signed int8, float8, or 0 to 15 for FP4.
        scale: float32 (P, G), what a code is multiplied with.
        zero: float32 (P, G) signed whole numbers, or None.
        global_scale: NVFP4: float32, what the stored scales are divided by.
        order: int (K,), the group of each input; None: neighbours.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None
    global_scale: Tensor | None = None
    order: Tensor | None = None
