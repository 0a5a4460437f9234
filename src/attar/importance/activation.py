"""Importance of heads and neurons from the size of what they compute.

Minitron: Muralidharan et al. 2024, arXiv 2407.14679, section 2.2, as its authors' Model Optimizer does it:

    a_f = || ( mean_s |x_bsf| )_b ||_2          I_u = || (a_f)_{f in u} ||_2

the mean of |x| over the tokens of a sequence, then the L2 norm over sequences (and over the channels of a
head). Letters: x (B, S, F) the inputs of the Linear that follows (o, down); u the columns of a unit.

Differs from the paper: heads are scored by their own output, as in Model Optimizer, not by its change of the
residual stream. One forward pass, no gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attar.importance.scoring import UnitScoring


def activation_importance(scoring: UnitScoring) -> Tensor:
    """I, float64 (layers, U). Does not modify the model."""

    def measure(batch: Tensor) -> Tensor:
        squares = scoring.inputs(batch, mean_squares)
        pairs = zip(squares, scoring.weights, strict=True)
        return torch.stack([layer.sums(values) for values, layer in pairs])

    return scoring.total("activation", measure).sqrt()


def mean_squares(x: Tensor) -> Tensor:
    """sum_b (mean_s |x_bsf|)^2, float64 (F,), of x (B, S, F)."""
    return x.abs().mean(1).double().square().sum(0)
