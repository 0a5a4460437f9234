"""What a second-order rounding returns."""

from __future__ import annotations

from dataclasses import dataclass

from attar.quantization.grids import QuantizedTensor


@dataclass(frozen=True)
class RoundingResult:
    """Codes, and what the algorithm had to do for them.

    Attributes:
        quantized: the codes.
        damp: lambda that was used, as a fraction of the Hessian's mean diagonal.
        dead: how many columns had no input.
    """

    quantized: QuantizedTensor
    damp: float
    dead: int
