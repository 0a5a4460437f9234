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

    d(1 - a) / dz_u = q_u (sum_v m_v q_v - m_u),   m_v = 1 where q_v < p_v
    dKL / dz_u = q_u - p_u

What differs: temperature T divides both logits and that is all (no T^2): a is the acceptance at T itself.

Letters: z (..., V) logits of the student over a vocabulary of V; p, q distributions of target and draft.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 1024  # tokens whose float32 probabilities exist at once
SLOPE = 3.0  # how fast lk lets go of KL


class _Drafting(torch.autograd.Function):  # type: ignore[misc]
    """Mean over tokens of l KL + (1 - l) (1 - a); l = exp(-slope a), or 0 where there is no slope."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, temperature: float, slope: float | None
    ) -> Tensor:
        z, t = student.reshape(-1, student.shape[-1]), teacher.reshape(-1, teacher.shape[-1])
        gradient = torch.empty_like(z)
        total = torch.zeros((), dtype=torch.float64, device=z.device)
        for start in range(0, z.shape[0], CHUNK):
            part = slice(start, start + CHUNK)
            log_p, log_q = (_log_probabilities(y[part], temperature) for y in (t, z))
            p, q = log_p.exp(), log_q.exp()
            below = (q < p).to(q.dtype)
            a = torch.minimum(p, q).sum(-1, keepdim=True)
            slopes = q * ((below * q).sum(-1, keepdim=True) - below)
            loss = 1.0 - a
            if slope is not None:
                weight = torch.exp(-slope * a)
                loss = weight * _kl(p, log_p, log_q) + (1.0 - weight) * loss
                slopes = weight * (q - p) + (1.0 - weight) * slopes
            total += loss.sum(dtype=torch.float64)
            gradient[part] = slopes / (temperature * z.shape[0])
        ctx.save_for_backward(gradient.reshape(student.shape))
        return (total / z.shape[0]).to(torch.promote_types(z.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0].to(gradient.dtype), None, None, None


def total_variation(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """1 - a = TV(teacher, student), mean over tokens: the fraction of drafts that is refused. Returns a
    scalar in [0, 1], float32 (float64 for float64 logits).

    Args:
        student: (..., V) logits, any float type; receives the gradient.
        teacher: (..., V) logits of the same shape.
        temperature: T at which both will be sampled.
    """
    return _apply(student, teacher, temperature, None)


def lk(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """l KL(teacher || student) + (1 - l) (1 - a) with l = exp(-3 a) for each token; mean over tokens.

    Arguments and result as of :func:`total_variation`; in nats as far as it is KL.
    """
    return _apply(student, teacher, temperature, SLOPE)


def acceptance(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """a = sum_v min(p_v, q_v) of every token: (...,) in [0, 1], in the wider of float32 and the logits' type.

    Args:
        student: (..., V) logits of the draft.
        teacher: (..., V) logits of the target.
        temperature: T at which both are sampled.
    """
    p, q = (_log_probabilities(z, temperature).exp() for z in (teacher, student))
    return torch.minimum(p, q).sum(-1)


def expected_tokens(a: float, K: int) -> float:
    """(1 - a^(K+1)) / (1 - a): tokens a pass of the target brings with K drafts, each accepted with a."""
    return sum(a**accepted for accepted in range(K + 1))


def _apply(student: Tensor, teacher: Tensor, temperature: float, slope: float | None) -> Tensor:
    assert student.shape == teacher.shape, (student.shape, teacher.shape)
    loss: Tensor = _Drafting.apply(student, teacher.detach(), temperature, slope)
    return loss


def _log_probabilities(z: Tensor, temperature: float) -> Tensor:
    return F.log_softmax(z.to(torch.promote_types(z.dtype, torch.float32)) / temperature, dim=-1)


def _kl(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) of every token, (n, 1) in nats; 0 ln 0 = 0."""
    return (p * (log_p - log_q)).masked_fill(p == 0, 0.0).sum(-1, keepdim=True)
