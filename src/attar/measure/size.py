"""How big a checkpoint is: read from its headers alone, whatever its size."""

from __future__ import annotations

from dataclasses import dataclass

from attar.measure.subject import Subject


@dataclass(frozen=True)
class Size:
    """Bytes of the stored tensors, parameters of the model they stand for, and the bits each parameter costs."""

    bytes: int
    parameters: int
    bits_per_weight: float
