"""Hard labels: the cross-entropy of the token that follows.

    L = - log q_y,   q = softmax(z),   dL / dz = q - (1 at y)

A temperature belongs to the soft loss (Hinton, Vinyals, Dean 2015, section 2) and is ignored here.

Letters: z (c, V) student's logits; y (c,) targets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.distillation.objectives.softmax import centre, exponentials


def loss_and_grad(z: Tensor, targets: Tensor, T: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each token in nats, and its gradient.

    Args:
        targets: int64 (c,), all tokens of the vocabulary.
    """
    z, at = centre(z, 1.0), targets[:, None]
    logits = z.gather(1, at)[:, 0]
    values = exponentials(z).sub_(logits)
    return values, z.scatter_add_(1, at, torch.full_like(at, -1, dtype=z.dtype))
