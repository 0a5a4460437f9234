"""Importance of the channels of the residual stream from what its norms put out.

Minitron: Muralidharan et al. 2024, arXiv 2407.14679, section 2.2 ("embedding channels"), as its authors'
Model Optimizer does it:

    I_d = sum_n || ( mean_s |y_nbsd| )_b ||_2

Letters: y_n (B, S, D) the output of norm n over the residual stream; the mean runs over the tokens of a
sequence, the L2 norm over sequences, the sum over norms.

Differs from the paper: the final norm (and any around embeddings) counts too. One forward pass without the
head, no gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attar.importance.activation import mean_squares

if TYPE_CHECKING:
    from attar.importance.scoring import UnitScoring


def stream_activation_importance(scoring: UnitScoring) -> Tensor:
    """I, float64 (1, D). Does not modify the model."""
    norms = scoring.norms()
    blank = torch.zeros(scoring.anatomy.hidden_size, dtype=torch.float64, device=scoring.device)

    def measure(batch: Tensor) -> Tensor:
        squares = scoring.outputs(batch, norms, mean_squares)
        return torch.stack([squares.get(number, blank) for number in range(len(norms))])

    return scoring.total("stream-activation", measure).sqrt().sum(0, keepdim=True)
