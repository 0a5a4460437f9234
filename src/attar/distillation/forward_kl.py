"""Forward KL: Hinton, Vinyals, Dean 2015, "Distilling the Knowledge in a Neural Network", arXiv 1503.02531,
section 2.

    L = T^2 * mean over tokens of KL(p || q),   p = softmax(z_teacher / T),  q = softmax(z_student / T)
    dL / dz_student = T (q - p) / tokens

T^2 keeps the gradient's size comparable across temperatures and belongs to the soft term only. KL(p || p) =
0: this is the divergence, not the cross-entropy that some libraries return under its name.

Letters: z (..., V) logits over a vocabulary of V; T temperature. The gradient is written down in the forward
pass, chunk by chunk, so that beside the two logit tensors only one more of their size ever exists.
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
    """T^2 KL(teacher || student) in nats, mean over tokens.

    Args:
        student: (..., V) logits, any float type; receives the gradient.
        teacher: (..., V) logits of the same shape.
        temperature: T.

    Returns:
        A scalar, float32 (float64 for float64 logits).
    """
    assert student.shape == teacher.shape, (student.shape, teacher.shape)
    loss: Tensor = _ForwardKL.apply(student, teacher.detach(), temperature)
    return loss
