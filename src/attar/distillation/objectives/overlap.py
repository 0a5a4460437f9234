"""Losses for a draft model: speculative decoding gains by the overlap of two distributions.

A token drawn from q is accepted with probability min(1, p / q) (Leviathan, Kalman, Matias 2022, "Fast
Inference from Transformers via Speculative Decoding", arXiv 2211.17192, theorem 3.5), in the mean over q

    a = sum_v min(p_v, q_v) = 1 - TV(p, q),    TV(p, q) = 1/2 sum_v |p_v - q_v|

and K drafts at one acceptance a bring (1 - a^(K+1)) / (1 - a) tokens a pass of the target (equation 1). So
two losses besides forward KL (DistillSpec, Zhou et al. 2023, arXiv 2310.08461, compares divergences and finds
that the best one depends on the task):

    tv    1 - a                                    what is wanted; flat where p and q hardly overlap
    lk    l KL(p || q) + (1 - l) (1 - a),   l = exp(-3 a)     KL far from the target, TV near it; l is of each
          token and counts as a number: no gradient flows through it

    d(1 - a) / du = q (sum_v m_v q_v - m),   m_v = 1 where q_v < p_v;   dKL / du = q - p;   u = z / T

What differs: temperature T divides both logits and that is all (no T^2): a is the acceptance at T itself.

Letters: z (c, V) logits of the draft; t (c, V) of the target; p, q distributions of target and draft.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.distillation.objectives.softmax import centre, dot, exponentials, finite, log_softmax

SLOPE = 3.0  # how fast lk lets go of KL


def total_variation_loss_and_grad(z: Tensor, t: Tensor, T: float = 1.0) -> tuple[Tensor, Tensor]:
    """1 - a = TV(teacher, student) of each token, the share of drafts refused, and its gradient."""
    q, p = log_softmax(z, T).exp_(), log_softmax(t, T).exp_()
    a, gradient = _refusal(p, q)
    return 1.0 - a, gradient.div_(T)


def lk_loss_and_grad(z: Tensor, t: Tensor, T: float = 1.0) -> tuple[Tensor, Tensor]:
    """l KL(teacher || student) + (1 - l) (1 - a) with l = exp(-3 a) of each token, and its
    gradient. In nats as far as it is KL."""
    q, p = centre(z, T), centre(t, T)
    d = finite(p - q)
    log_Q, log_P = exponentials(q), exponentials(p)
    kl = dot(p, d).add_(log_Q).sub_(log_P).clamp_(min=0.0)
    a, gradient = _refusal(p, q)
    weight = torch.exp(-SLOPE * a)
    values = weight * kl + (1.0 - weight) * (1.0 - a)
    weight = weight[:, None] / T
    return values, gradient.mul_(1.0 / T - weight).add_(q.sub_(p).mul_(weight))


def _refusal(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """a (c,) of each token, and the gradient (c, V) of 1 - a by the draft's logits over T."""
    below = (q < p).to(q.dtype)
    return torch.minimum(p, q).sum(-1), (dot(below, q)[:, None] - below).mul_(q)


def acceptance(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """a = sum_v min(p_v, q_v) of every token: (...,) in [0, 1], in the wider of float32 and the logits' type.

    Args:
        student: (..., V) logits of the draft.
        teacher: (..., V) logits of the target.
        temperature: T at which both are sampled.
    """
    wide = torch.promote_types(student.dtype, torch.float32)
    p, q = ((z.to(wide) / temperature).softmax(-1) for z in (teacher, student))
    return torch.minimum(p, q).sum(-1)


def expected_tokens(a: float, K: int) -> float:
    """(1 - a^(K+1)) / (1 - a): tokens a pass of the target brings with K drafts, each accepted with a."""
    return sum(a**accepted for accepted in range(K + 1))
