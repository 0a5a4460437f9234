"""Forward KL: Hinton, Vinyals, Dean 2015, "Distilling the Knowledge in a Neural Network", arXiv 1503.02531,
section 2.

    L = T^2 * mean over tokens of KL(p || q),   p = softmax(z_teacher / T),  q = softmax(z_student / T)
    dL / dz_student = T (q - p) / tokens

T^2 keeps the gradient's size comparable across temperatures and belongs to the soft term only. KL(p || p) =
0: this is the divergence, not the cross-entropy that some libraries return under its name.

Where p is known by K of its tokens (teacher.py), p' in its place, and its entropy H(p):

    L = T^2 * mean over tokens of (- sum p' log q - H(p)),   E[L] = the L above where E[p'] = p

Letters: z (..., V) logits over a vocabulary of V; T temperature. The gradient is written down in the forward
pass, chunk by chunk, so that only one more tensor of the logits' size ever exists.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 1024  # tokens whose float32 probabilities exist at once


class _ForwardKL(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        z, t = student.reshape(-1, student.shape[-1]), teacher.reshape(-1, teacher.shape[-1])
        gradient = torch.empty_like(z)
        total = torch.zeros((), dtype=torch.float64, device=z.device)
        for rows in torch.arange(z.shape[0], device="cpu").split(CHUNK):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            wide = torch.promote_types(z.dtype, torch.float32)
            log_q = F.log_softmax(z[part].to(wide) / temperature, dim=-1)
            log_p = F.log_softmax(t[part].to(wide) / temperature, dim=-1)
            p = log_p.exp()
            total += (p * (log_p - log_q)).sum(dtype=torch.float64)
            gradient[part] = log_q.exp_().sub_(p).mul_(temperature / z.shape[0])
        ctx.save_for_backward(gradient.reshape(student.shape))
        return (total * temperature**2 / z.shape[0]).to(torch.promote_types(z.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0].to(gradient.dtype), None, None


def forward_kl(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """T^2 KL(teacher || student) in nats, mean over tokens. Returns a scalar, float32 (float64 for float64
    logits).

    Args:
        student: (..., V) logits, any float type; receives the gradient.
        teacher: (..., V) logits of the same shape.
        temperature: T.
    """
    assert student.shape == teacher.shape, (student.shape, teacher.shape)
    loss: Tensor = _ForwardKL.apply(student, teacher.detach(), temperature)
    return loss


class _SparseForwardKL(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, tokens: Tensor, weights: Tensor, entropy: Tensor, temperature: float
    ) -> Tensor:
        wide = torch.promote_types(student.dtype, torch.float32)
        gradient = torch.empty_like(student)
        total = -entropy.sum(dtype=torch.float64)
        for rows in torch.arange(len(student), device="cpu").split(CHUNK):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            log_q = F.log_softmax(student[part].to(wide) / temperature, dim=-1)
            kept, p = tokens[part], weights[part].to(wide)
            total -= (p * log_q.gather(1, kept)).sum(dtype=torch.float64)
            q = log_q.exp_().scatter_add_(1, kept, -p)
            gradient[part] = q.mul_(temperature / len(student))
        ctx.save_for_backward(gradient)
        return (total * temperature**2 / len(student)).to(wide)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0].to(gradient.dtype), None, None, None, None


def sparse_forward_kl(
    student: Tensor, tokens: Tensor, weights: Tensor, entropy: Tensor, temperature: float = 1.0
) -> Tensor:
    """:func:`forward_kl` where the teacher is known by some tokens of each position. Returns a scalar,
    float32 (float64 for float64 logits); below 0 by chance where p' was drawn.

    Args:
        student: (n, V) logits, any float type; receives the gradient.
        tokens: int64 (n, K); a token may occur twice.
        weights: (n, K), what p' has on each; a row sums to 1.
        entropy: (n,) of the whole p, in nats.
        temperature: T, at which the weights were made.
    """
    loss: Tensor = _SparseForwardKL.apply(student, tokens, weights, entropy, temperature)
    return loss
