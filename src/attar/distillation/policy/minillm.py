"""MiniLLM: Gu, Dong, Wei, Huang 2023, "MiniLLM: Knowledge Distillation of Large Language Models", arXiv
2306.08543: the reverse KL of whole answers by policy gradient, with its four remedies.

    answers are drawn from   b = a p + (1 - a) q                                  teacher-mixed sampling
    dL = sum over t of  d KL(q_t || p_t)                                          single-step decomposition
       - sum over t of  rho_t d log q(y_t) 1 / (S - t) sum over i > t of r_i      length normalisation
    rho_t = q(y_t) / b(y_t), clipped as in PPO,   r_i = log p(y_i) - log q(y_i)
    + the cross-entropy of as many rows of text                                   language modelling

KL(q_t || p_t) is over the whole vocabulary at position t: that part of the policy gradient needs no draws.
rho_t is the paper's approximation of the product of the ratios up to t. The advantage is a constant; the
token that ends an answer counts; padding does not. Rewards are limited, as in the authors' code.

Letters: B rows, S positions a row, c tokens of a chunk; p, q, b teacher, student, behaviour; a its mixture;
y tokens; T temperature; z, t logits of student and teacher.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attar.distillation.objectives import hard, reverse_kl
from attar.distillation.policy import policy_gradient
from attar.distillation.policy.returns import later, returns, rewards

TEACHER_MIX = 0.2  # a
CLIP_RATIO = 0.2  # of rho
REWARD_CLIP = 10.0  # largest |r|


class MiniLLMTerms(NamedTuple):
    """What :func:`loss_and_grad` needs of rows, (B, S) each.

    Attributes:
        anchor: log-probabilities that the student's are divided by in rho.
        advantage: of drawn tokens.
        step: the weight of the KL at a position.
        text: the weight of the cross-entropy at a position.
    """

    anchor: Tensor
    advantage: Tensor
    step: Tensor
    text: Tensor


def terms(log_p: Tensor, behaviour: Tensor, policy: Tensor, drawn: Tensor) -> MiniLLMTerms:
    """From log-probabilities of drawn tokens (B, S), see :func:`policy_gradient.terms`; of no text."""
    R = later(returns(rewards(log_p, policy).clamp(-REWARD_CLIP, REWARD_CLIP)))
    R = R / later(returns(drawn.to(R.dtype))).clamp(min=1.0)
    return MiniLLMTerms(behaviour, R * drawn, drawn.to(R.dtype), torch.zeros_like(R))


def loss_and_grad(
    z: Tensor,
    t: Tensor,
    y: Tensor,
    anchor: Tensor,
    advantage: Tensor,
    step: Tensor,
    text: Tensor,
    T: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """T^2 times the loss of each drawn token, the cross-entropy of each token of text; and the gradients.

    Args:
        z: (c, V), and t: the teacher's.
        y: int64 (c,), drawn or read.
        anchor: (c,), as in :class:`MiniLLMTerms`; also the next ones.
    """
    values, dz = policy_gradient.loss_and_grad(z, y, anchor, advantage, T, clip_ratio=CLIP_RATIO)
    if bool(step.any()):
        kl, slope = reverse_kl.loss_and_grad(z, t, T)
        values, dz = values + step * kl, dz.addcmul_(slope, step[:, None])
    if bool(text.any()):
        loss, slope = hard.loss_and_grad(z, y)
        values, dz = values + text * loss, dz.addcmul_(slope, text[:, None])
    return values, dz
