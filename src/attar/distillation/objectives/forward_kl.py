"""Forward KL: Hinton, Vinyals, Dean 2015, "Distilling the Knowledge in a Neural Network", arXiv 1503.02531,
section 2.

    L = T^2 KL(p || q),   p = softmax(t / T),  q = softmax(z / T),   dL / dz = T (q - p)

T^2 keeps the gradient's size comparable across temperatures and belongs to the soft term only. KL(p || p) =
0: this is the divergence, not the cross-entropy that some libraries return under its name.

Where p is known by K of its tokens (``signals/cached.py``), p' in its place, and its entropy H(p):

    L = T^2 (- sum p' log q - H(p)),   E[L] = the L above where E[p'] = p

Letters: z (c, V) student's logits; t (c, V) teacher's; T temperature. One exponential an element:

    KL = sum_v p_v (t_v - z_v) / T + ln Q - ln P,   P, Q the sums of the exponentials
"""

from __future__ import annotations

from torch import Tensor

from attar.distillation.objectives.softmax import centre, dot, exponentials, finite


def loss_and_grad(z: Tensor, t: Tensor, T: float = 1.0) -> tuple[Tensor, Tensor]:
    """T^2 KL(teacher || student) of each token in nats, and its gradient."""
    z, t = centre(z, T), centre(t, T)
    d = finite(t - z)
    log_Q, log_P = exponentials(z), exponentials(t)
    values = dot(t, d).add_(log_Q).sub_(log_P)
    return values.clamp_(min=0.0).mul_(T * T), z.sub_(t).mul_(T)


def sparse_loss_and_grad(
    z: Tensor, tokens: Tensor, weights: Tensor, entropy: Tensor, T: float = 1.0
) -> tuple[Tensor, Tensor]:
    """:func:`loss_and_grad` where the teacher is known by some tokens of each position. A value may be
    below 0 by chance where p' was drawn.

    Args:
        z: (c, V) student's logits.
        tokens: int64 (c, K); a token may occur twice.
        weights: (c, K), what p' has on each; a row sums to 1.
        entropy: (c,) of the whole p, in nats.
        T: temperature, at which the weights were made.
    """
    z, weights = centre(z, T), weights.to(z.dtype)
    kept = finite(z.gather(1, tokens))
    log_Q = exponentials(z)
    values = log_Q.sub_(dot(weights, kept)).sub_(entropy.to(z.dtype))
    return values.mul_(T * T), z.scatter_add_(1, tokens, -weights).mul_(T)
