"""Importance of heads and neurons from their share of the next projection's output.

Wanda's metric (Sun et al. 2023, arXiv 2306.11695) summed over the columns of a unit, as FLAP (An et al. 2023,
arXiv 2312.11983, WIFN) and FASP (Hu et al. 2025, arXiv 2501.09412) do for structures:

    I_u = ( sum_{f in u} ||W_:f||_2^2 ||X_f||_2^2 )^1/2

Letters: W (N, F) the projection that follows (o, down); X (T, F) its inputs on all calibration tokens. For
one column this is the exact norm of what its removal takes from the projection's output.

Differs from the papers: columns are summed as squares, so that I_u is that norm for uncorrelated columns of a
head; FASP adds |W| ||X||. One forward pass, no gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attar.models.anatomy.parts import weight_of

if TYPE_CHECKING:
    from attar.importance.scoring import UnitScoring


def weighted_activation_importance(scoring: UnitScoring) -> Tensor:
    """I, float64 (layers, U). Does not modify the model."""
    norms = [weight_of(layer.consumer).detach().double().square().sum(0) for layer in scoring.weights]

    def measure(batch: Tensor) -> Tensor:
        squares = scoring.inputs(batch, token_squares)
        rows = zip(squares, norms, scoring.weights, strict=True)
        return torch.stack([layer.sums(x * w) for x, w, layer in rows])

    return scoring.total("weighted-activation", measure).sqrt()


def token_squares(x: Tensor) -> Tensor:
    """sum_bs x_bsf^2, float64 (F,), of x (B, S, F)."""
    return x.flatten(0, 1).square().sum(0).double()
