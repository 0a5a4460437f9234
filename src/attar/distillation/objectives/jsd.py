"""Generalized Jensen-Shannon divergence: Agarwal et al. 2023, "On-Policy Distillation of Language Models:
Learning from Self-Generated Mistakes" (GKD), arXiv 2306.13649, equation 1.

    JSD(b) = b KL(p || m) + (1 - b) KL(q || m),   m = b p + (1 - b) q
    L = T^2 JSD(b) / (b (1 - b)),   dL / dz_u = T q_u (log q_u / m_u - KL(q || m)) / b

Differs from the paper: JSD(b) vanishes like b at 0 and like 1 - b at 1, so that at b = 0.1 its gradient is a
tenth of forward KL's. Divided by b (1 - b) the loss is forward KL at b = 0 and reverse KL at b = 1,
continuously; at b = 0.5 it is four times the Jensen-Shannon divergence. T^2 as in forward KL.

Letters: z (c, V) student's logits; t (c, V) teacher's; T temperature; b beta.
"""

from __future__ import annotations

from torch import Tensor

from attar.distillation.objectives import forward_kl, reverse_kl
from attar.distillation.objectives.softmax import by_logits, dot, log_mixture, log_ratio, log_softmax


def loss_and_grad(z: Tensor, t: Tensor, T: float = 1.0, *, beta: float = 0.5) -> tuple[Tensor, Tensor]:
    """T^2 JSD(beta) / (beta (1 - beta)) of each token in nats, and its gradient.

    Args:
        beta: 0 (forward KL) to 1 (reverse KL).
    """
    if beta in (0.0, 1.0):
        return reverse_kl.loss_and_grad(z, t, T) if beta else forward_kl.loss_and_grad(z, t, T)
    log_p, log_q = log_softmax(t, T), log_softmax(z, T)
    d = log_ratio(log_p, log_q)
    if beta <= 0.5:  # the logarithm that vanishes with the smaller weight is computed, the other follows
        q_to_m = log_mixture(d, beta).neg_()  # log q / m
        p_to_m = d.add_(q_to_m)
    else:
        p_to_m = log_mixture(-d, 1.0 - beta).neg_()
        q_to_m = p_to_m - d
    p, q = log_p.exp_(), log_q.exp_()
    values = dot(p, p_to_m).div_(1.0 - beta).add_(dot(q, q_to_m), alpha=1.0 / beta)
    return values.mul_(T * T), by_logits(q, q_to_m).mul_(T / beta)
