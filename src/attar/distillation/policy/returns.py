"""What follows a drawn token: rewards summed over the rest of its row.

    r_t = log p(y_t) - log q(y_t)          R_t = sum over i >= t of D^(i - t) r_i

Letters: B rows, S positions a row; p, q teacher and student; D discount.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rewards(log_p: Tensor, log_q: Tensor, clip: float = 0.0) -> Tensor:
    """r (...), within ``clip`` of 0; 0: unlimited. Both log-probabilities are 0 where nothing was drawn."""
    r = log_p - log_q
    return r.clamp(-clip, clip) if clip else r


def returns(r: Tensor, D: float) -> Tensor:
    """R (B, S) of rewards (B, S) that are 0 where nothing was drawn."""
    if D == 0.0:
        return r.clone()
    if D == 1.0:
        return r.flip(1).cumsum(1).flip(1)
    result = r.clone()
    for t in range(r.shape[1] - 2, -1, -1):
        result[:, t] += D * result[:, t + 1]
    return result


def later(x: Tensor) -> Tensor:
    """Values (B, S) of the position after each, 0 at the end."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1)
