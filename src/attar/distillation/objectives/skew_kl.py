"""Skew KL and skew reverse KL: Ko, Kim, Chen, Yun 2024, "DistiLLM: Towards Streamlined Distillation for Large
Language Models", arXiv 2402.03898, section 3.1 (alpha = 0.1 there).

    skew KL          T^2 KL(p || m),  m = a p + (1 - a) q
                     gradient  T (1 - a) (q sum_v w_v - w),  w = q p / m
    skew reverse KL  T^2 KL(q || m),  m = a q + (1 - a) p
                     gradient  T q (g - sum_v q_v g_v),  g = log q / m - a q / m

Mixing a little of the one into the other bounds the ratio: the gradient of tokens that the student holds for
impossible does not explode, and the estimate from few samples is steadier. At a = 0 they are forward and
reverse KL. T^2 as in forward KL.

Letters: z (c, V) student's logits; t (c, V) teacher's; p, q their distributions; T temperature; a weight
of the first in the mixture.
"""

from __future__ import annotations

from torch import Tensor

from attar.distillation.objectives import forward_kl, reverse_kl
from attar.distillation.objectives.softmax import by_logits, dot, log_mixture, log_ratio, log_softmax


def loss_and_grad(z: Tensor, t: Tensor, T: float = 1.0, *, beta: float = 0.1) -> tuple[Tensor, Tensor]:
    """T^2 KL(p || a p + (1 - a) q) of each token in nats, and its gradient.

    Args:
        beta: a, 0 (forward KL) or more, below 1.
    """
    if beta == 0.0:
        return forward_kl.loss_and_grad(z, t, T)
    log_p, log_q = log_softmax(t, T), log_softmax(z, T)
    d = log_ratio(log_p, log_q)
    m_to_q = log_mixture(d, beta)  # log m / q
    p, q = log_p.exp(), log_q.exp_()
    values = dot(p, d.sub_(m_to_q))
    w = log_p.sub_(m_to_q).exp_()
    return values.mul_(T * T), q.mul_(w.sum(-1, keepdim=True)).sub_(w).mul_(T * (1.0 - beta))


def reverse_loss_and_grad(
    z: Tensor, t: Tensor, T: float = 1.0, *, beta: float = 0.1
) -> tuple[Tensor, Tensor]:
    """T^2 KL(q || a q + (1 - a) p) of each token in nats, and its gradient.

    Args:
        beta: a, 0 (reverse KL) or more, below 1.
    """
    if beta == 0.0:
        return reverse_kl.loss_and_grad(z, t, T)
    log_q = log_softmax(z, T)
    d = log_ratio(log_q, log_softmax(t, T))
    q_to_m = d.sub_(log_mixture(d, beta))
    q = log_q.exp_()
    values = dot(q, q_to_m)
    g = q_to_m.sub_(q_to_m.exp(), alpha=beta)
    return values.mul_(T * T), by_logits(q, g).mul_(T)
