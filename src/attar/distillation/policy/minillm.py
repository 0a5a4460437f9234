"""MiniLLM: Gu, Dong, Wei, Huang 2023, "MiniLLM: Knowledge Distillation of Large Language Models", arXiv
2306.08543: the reverse KL of whole answers by policy gradient, with its four remedies.

    answers are drawn from   b = a p + (1 - a) q                                  teacher-mixed sampling
    dL = sum over t of  u_t d KL(q_t || p_t)                                      single-step decomposition
       - sum over t of  rho_t d log q(y_t) 1 / (S - t) sum over i > t of D^(i - t) r_i  length normalisation
    rho_t = q(y_t) / b(y_t), clipped as in PPO,   r_i = log p(y_i) - log q(y_i)
    + w times the cross-entropy of text                                           language modelling

KL(q_t || p_t) is over the whole vocabulary at position t: that part of the policy gradient needs no draws.
Without the decomposition the sum begins at i = t. ``importance`` says what makes up for drawing from b:

    token    rho_t, the paper's approximation of the product; u = 1, as in the authors' code
    prefix   exact: r_i times prod over j <= i of w_j,  u_t = prod over j < t of w_j,   w = q / b
    none     nothing

With ``prefix`` (or a = 0), no clip, no length normalisation and D = 1 the expectation is the gradient of
KL(q || p) of whole rows. The advantage is a constant; the token that ends an answer counts; padding does not.

Differs from the paper: D is an option (1). Rewards are limited, as in the authors' code; the authors also
scale advantages to variance 1 in a batch: ``whiten``.

Letters: B rows, S positions a row, c tokens of a chunk; p, q, b teacher, student, behaviour; a its mixture;
D discount; y tokens; T temperature; z, t logits of student and teacher.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attar.distillation.objectives import hard, reverse_kl
from attar.distillation.policy import policy_gradient
from attar.distillation.policy.returns import later, returns, rewards


class MiniLLMTerms(NamedTuple):
    """What :func:`loss_and_grad` needs of rows, (B, S) each.

    Attributes:
        anchor: log-probabilities that the student's are divided by in rho.
        advantage: of drawn tokens.
        step: u, the weight of the KL at a position.
        text: the weight of the cross-entropy at a position.
    """

    anchor: Tensor
    advantage: Tensor
    step: Tensor
    text: Tensor


def terms(
    log_p: Tensor,
    behaviour: Tensor,
    policy: Tensor,
    drawn: Tensor,
    *,
    single_step: bool,
    importance: str,
    length_norm: bool,
    discount: float,
    reward_clip: float,
    whiten: bool,
) -> MiniLLMTerms:
    """From log-probabilities of drawn tokens (B, S), see :func:`policy_gradient.terms`; of no text."""
    r = rewards(log_p, policy, reward_clip)
    weight = torch.ones_like(r)
    if importance == "prefix":
        weight = (policy - behaviour).cumsum(1).exp()
    R = returns(r * weight, discount)
    count = returns(drawn.to(r.dtype), 1.0)
    if single_step:
        R, count = discount * later(R), later(count)
    if length_norm:
        R = R / count.clamp(min=1.0)
    if whiten and bool(drawn.any()):
        values = R[drawn]
        R = (R - values.mean()) / (values.var(unbiased=False) + 1e-8).sqrt()
    before = torch.cat([torch.ones_like(weight[:, :1]), weight[:, :-1]], 1)
    step = before * drawn if single_step else torch.zeros_like(r)
    anchor = behaviour if importance == "token" else policy
    return MiniLLMTerms(anchor, R * drawn, step, torch.zeros_like(r))


def loss_and_grad(
    z: Tensor,
    t: Tensor,
    y: Tensor,
    anchor: Tensor,
    advantage: Tensor,
    step: Tensor,
    text: Tensor,
    T: float = 1.0,
    *,
    clip_ratio: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """T^2 times the loss of each drawn token, the cross-entropy of each token of text; and the gradients.

    Args:
        z: (c, V), and t: the teacher's.
        y: int64 (c,), drawn or read.
        anchor: (c,), as in :class:`MiniLLMTerms`; also the next ones.
        clip_ratio: PPO's; 0: not clipped.
    """
    values, dz = policy_gradient.loss_and_grad(z, y, anchor, advantage, T, clip_ratio=clip_ratio)
    if bool(step.any()):
        kl, slope = reverse_kl.loss_and_grad(z, t, T)
        values, dz = values + step * kl, dz.addcmul_(slope, step[:, None])
    if bool(text.any()):
        loss, slope = hard.loss_and_grad(z, y)
        values, dz = values + text * loss, dz.addcmul_(slope, text[:, None])
    return values, dz
