"""Reverse KL: Gu, Dong, Wei, Huang 2023, "MiniLLM: Knowledge Distillation of Large Language Models", arXiv
2306.08543, equation 1, here over the vocabulary at each position of given text (the policy gradient of the
paper, over whole answers, is in ``policy/``).

    L = T^2 KL(q || p),   p = softmax(t / T),  q = softmax(z / T),   dL / dz_u = T q_u (d_u - KL(q || p))
    d = log q - log p

The student is not asked to cover all that the teacher may say: it seeks a mode. T^2 as in forward KL.

Letters: z (c, V) student's logits; t (c, V) teacher's; T temperature.
"""

from __future__ import annotations

from torch import Tensor

from attar.distillation.objectives.softmax import dot, finite, log_softmax


def loss_and_grad(z: Tensor, t: Tensor, T: float = 1.0) -> tuple[Tensor, Tensor]:
    """T^2 KL(student || teacher) of each token in nats, and its gradient. Where a
    token is impossible for the teacher alone, its log ratio counts as 10^3."""
    log_q = log_softmax(z, T)
    d = finite(log_q - log_softmax(t, T))
    q = log_q.exp_()
    values = dot(q, d)
    return values.mul(T * T), d.sub_(values[:, None]).mul_(q).mul_(T)
