"""How far activations reach: what a static scale is chosen from.

    s = 2 max|x| / (high - low)                                     symmetric
    s = (max x - min x) / (high - low) ,  z = round(low - min x / s)    asymmetric, 0 counted among the x

Letters: x every number seen; s scale; z zero; low, high the ends of the codes: -128 and 127 of int8, -448 and
448 of float8_e4m3fn. As compressed-tensors computes them from its minimum and maximum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.errors import NumericsError
from attar.formats.rules import ActivationRule


class ActivationRange:
    """The smallest and the largest number seen, over any number of batches.

    Attributes:
        rule: how the activation will be rounded.
        low, high: the ends of what was seen, 0 among it.
        tokens: vectors seen.
    """

    def __init__(self, rule: ActivationRule) -> None:
        self.rule = rule
        self.low = self.high = torch.zeros(())
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        """Add a batch (..., K). Does not modify it.

        Raises:
            NumericsError: it holds NaN or infinity.
        """
        low, high = torch.aminmax(x.detach())
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise NumericsError(
                "an activation holds NaN or infinity", hint="check the model, or its number type"
            )
        self.low = torch.minimum(self.low.to(x.device), low.float())
        self.high = torch.maximum(self.high.to(x.device), high.float())
        self.tokens += x[..., 0].numel()

    def scale(self) -> float:
        """s; 1 where only zeros were seen.

        Raises:
            NumericsError: nothing was seen.
        """
        if not self.tokens:
            raise NumericsError("no activation was seen", hint="calibrate with more samples")
        low, high = self.rule.limits
        top = torch.maximum(-self.low, self.high) * 2 if self.rule.symmetric else self.high - self.low
        return float(top / (high - low)) or 1.0

    def zero(self) -> float:
        """z, a whole number; 0 where the rule is symmetric."""
        if self.rule.symmetric:
            return 0.0
        low, high = self.rule.limits
        return float((low - self.low / self.scale()).round().clamp(low, high))
