"""What the objectives share: probabilities of logits, and the mixture of two distributions.

    d = log p - log q;   m = w p + (1 - w) q;   log m / q = log(1 + w (e^d - 1))

Written so, the logarithm keeps its digits for any w: 0 at w = 0, d at w = 1. Where p_v = q_v = 0 (both logits
are -inf), d = 0; where one of them is 0 alone, a log ratio counts as 10^3, so that no loss is infinite.

Letters: z (c, V) logits; p, q distributions of teacher and student; T temperature; w weight of p.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGE = 80.0  # e^LARGE is still a float32
FAR = 1e3  # a log ratio beyond which one of both probabilities is 0 in any float type


def centre(z: Tensor, T: float) -> Tensor:
    """(z - max z) / T."""
    centred = z - z.amax(-1, keepdim=True)
    return centred if T == 1.0 else centred.div_(T)


def exponentials(z: Tensor) -> Tensor:
    """The logarithm of the sum of e^z of each row (c,); z, at most 0, becomes the probabilities."""
    Z = z.exp_().sum(-1, keepdim=True)
    z.div_(Z)
    return Z[:, 0].log_()


def log_softmax(z: Tensor, T: float) -> Tensor:
    """Logarithms of the probabilities (c, V) at temperature T."""
    return torch.log_softmax(z if T == 1.0 else z / T, -1)


def finite(d: Tensor) -> Tensor:
    """Differences of logarithms with 0 in the place of inf - inf, and 10^3 of infinity; in place."""
    return d.nan_to_num_(nan=0.0, posinf=FAR, neginf=-FAR)


def log_ratio(log_p: Tensor, log_q: Tensor) -> Tensor:
    """d = log p - log q, within 10^3."""
    return finite(log_p - log_q).clamp_(-FAR, FAR)


def log_mixture(d: Tensor, w: float) -> Tensor:
    """log m / q of the mixture m = w p + (1 - w) q, 0 < w < 1; d within 10^3."""
    large = (d - LARGE).clamp_(min=0.0)
    return d.clamp(max=LARGE).expm1_().mul_(w).log1p_().add_(large)


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Sum of the products of each row, (c,)."""
    return torch.linalg.vecdot(x, y)


def by_logits(q: Tensor, g: Tensor) -> Tensor:
    """q (g - sum_v q g): from gradients g by the probabilities to gradients by the logits; overwrites g."""
    return g.sub_(dot(q, g)[:, None]).mul_(q)
