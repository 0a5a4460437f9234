"""Policy gradient of the reverse KL: Lu and Thinking Machines Lab 2025, "On-Policy Distillation",
thinkingmachines.ai/blog/on-policy-distillation. The student is rewarded for each token that it drew by what
the teacher thinks of it.

    A_t = sum over i >= t of D^(i - t) (log p(y_i) - log q(y_i))      D = 0: the token's own reward alone
    rho_t = q(y_t) / b(y_t),   L = - sum over t of min(rho_t A_t, clip(rho_t, 1 - e, 1 + e) A_t)

With D = 0 the expectation of dL is that of the reverse KL at each position, given the text before it; with
D = 1 it is the gradient of KL(q || p) of whole rows. The advantage A is a constant: no gradient goes through
the reward or through the draws. b is the law that drew the row, a student of some steps ago for instance; its
numbers, bfloat16 say, are corrected by the ratio too. T^2 as in forward KL; q and p are at temperature T.

Differs from the source: a discount and PPO's clip (Schulman et al. 2017, arXiv 1707.06347, equation 7) are
options. Rewards are of the student that drew, as in the source.

Letters: B rows, S positions a row, c drawn tokens of a chunk; p, q teacher and student; b behaviour; A
advantage; D discount; rho ratio; e clip; y tokens; T temperature.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attar.distillation.objectives.softmax import log_softmax
from attar.distillation.policy.returns import returns, rewards


class PolicyTerms(NamedTuple):
    """What :func:`loss_and_grad` needs of rows, (B, S) each.

    Attributes:
        anchor: log-probabilities that the student's are divided by in rho.
        advantage: A.
    """

    anchor: Tensor
    advantage: Tensor


def terms(
    log_p: Tensor, behaviour: Tensor, policy: Tensor, *, discount: float, reward_clip: float
) -> PolicyTerms:
    """From log-probabilities of drawn tokens (B, S), 0 where none was drawn.

    Args:
        log_p: the teacher's.
        behaviour: of the law that drew them, log b.
        policy: of the student at that time.
    """
    return PolicyTerms(behaviour, returns(rewards(log_p, policy, reward_clip), discount))


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
