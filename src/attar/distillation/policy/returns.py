"""What follows a drawn token: rewards summed over the rest of its row.

    r_t = log p(y_t) - log q(y_t)          R_t = sum over i >= t of r_i

Letters: B rows, S positions a row; p, q teacher and student.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rewards(log_p: Tensor, log_q: Tensor) -> Tensor:
    """r (...). Both log-probabilities are 0 where nothing was drawn."""
    return log_p - log_q


def returns(r: Tensor) -> Tensor:
    """R (B, S) of rewards (B, S) that are 0 where nothing was drawn."""
    return r.flip(1).cumsum(1).flip(1)


def later(x: Tensor) -> Tensor:
    """Values (B, S) of the position after each, 0 at the end."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1)
