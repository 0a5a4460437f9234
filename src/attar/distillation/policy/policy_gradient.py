"""Policy gradient of the reverse KL: Lu and Thinking Machines Lab 2025, "On-Policy Distillation",
thinkingmachines.ai/blog/on-policy-distillation. The student is rewarded for each token that it drew by what
the teacher thinks of it.

    A_t = log p(y_t) - log q(y_t)
    rho_t = q(y_t) / b(y_t),   L = - sum over t of min(rho_t A_t, clip(rho_t, 1 - e, 1 + e) A_t)

The expectation of dL is that of the reverse KL at each position, given the text before it. The advantage A is
a constant: no gradient goes through the reward or through the draws. b is the distribution that drew the row,
a student of some steps ago for instance; its numbers, bfloat16 say, are corrected by the ratio too. T^2 as in
forward KL; q and p are at temperature T. Rewards are of the student that drew.

MiniLLM clips the ratio as PPO does (Schulman et al. 2017, arXiv 1707.06347, equation 7); the source does not.

Letters: B rows, S positions a row, c drawn tokens of a chunk; p, q teacher and student; b behaviour; A
advantage; rho ratio; e clip; y tokens; T temperature.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attar.distillation.objectives.softmax import log_softmax
from attar.distillation.policy.returns import rewards


class PolicyTerms(NamedTuple):
    """What :func:`loss_and_grad` needs of rows, (B, S) each.

    Attributes:
        anchor: log-probabilities that the student's are divided by in rho.
        advantage: A.
    """

    anchor: Tensor
    advantage: Tensor


def terms(log_p: Tensor, behaviour: Tensor, policy: Tensor) -> PolicyTerms:
    """From log-probabilities of drawn tokens (B, S), 0 where none was drawn.

    Args:
        log_p: the teacher's.
        behaviour: of the distribution that drew the tokens, log b.
        policy: of the student at that time.
    """
    return PolicyTerms(behaviour, rewards(log_p, policy))


def loss_and_grad(
    z: Tensor, y: Tensor, anchor: Tensor, advantage: Tensor, T: float = 1.0, *, clip_ratio: float = 0.0
) -> tuple[Tensor, Tensor]:
    """T^2 L of each drawn token, and its gradient by the student's logits.

    Args:
        z: (c, V).
        y: int64 (c,).
        anchor: (c,), as in :class:`PolicyTerms`; also the next one.
        clip_ratio: e; 0: not clipped.
    """
    log_q = log_softmax(z, T)
    at = y[:, None]
    rho = (log_q.gather(1, at)[:, 0] - anchor).exp()
    values = -advantage * rho
    weight = values
    if clip_ratio:
        clipped = -advantage * rho.clamp(1.0 - clip_ratio, 1.0 + clip_ratio)
        weight = torch.where(values >= clipped, values, 0.0)  # a clipped ratio is a constant
        values = torch.maximum(values, clipped)
    dz = log_q.exp_().mul_(-weight[:, None] * T)
    return values * T**2, dz.scatter_add_(1, at, weight[:, None] * T)
