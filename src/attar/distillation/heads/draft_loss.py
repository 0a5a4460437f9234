"""The loss of drafted distributions against the target's, a chunk of predictions at a time, without all
logits.

    z = target's head(h) + W2 e,   q = softmax(z)
    L = sum over predictions of w (alpha CE(q, y) + beta |q - p|_1),    |q - p|_1 = 2 (1 - a)
    a = sum_v min(p_v, q_v) = 1 - TV(p, q)                              the acceptance of a draft drawn from q

    d(1 - a)/dz = q (sum_v m_v q_v - m),  m_v = 1 where q_v < p_v;   dCE/dz = q - (1 at y)

With a reduced vocabulary q is over v tokens and p over all: what p gives to others is never accepted, and
counts in the distance. A label that the head has no token for has no cross-entropy.

Gradients are computed in the forward pass, as in ``distillation/fused.py``, some predictions at a time, and
overwrite the logits of a chunk. Predictions of one position follow each other, so that the target's head
reads a position once a chunk.

Letters: n predictions, c of a chunk at u positions, H hidden size, r Markov rank, V vocabulary of the target,
v of the head; h (n, H) states, e (n, r) latents of the Markov head, W2 (v, r), p and q of target and draft, y
labels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attar.data.packing import PADDING
from attar.distillation.objectives.chunked import BYTES, rows_at_once
from attar.distillation.objectives.softmax import dot
from attar.models.head import Head, product_type


@dataclass(frozen=True)
class DraftTargets:
    """What drafted distributions are compared with.

    Attributes:
        final: (positions, H), what the target's head reads.
        positions: int64 (n,), the position of each prediction in ``final``, ascending.
        labels: int64 (n,), the head's own tokens; PADDING: none.
        head: the target's.
        chosen: int64 (v,), the target's tokens that the head has; None: all.
    """

    final: Tensor
    positions: Tensor
    labels: Tensor
    head: Head
    chosen: Tensor | None = None

    def probabilities(self, part: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """p (u, v) at the different positions of predictions, in at least float32, with sums below 1 where
        v < V; and the row int64 (c,) of each prediction."""
        positions, rows = torch.unique_consecutive(self.positions[part], return_inverse=True)
        logits = self.head.logits(self.final[positions].to(dtype))
        p = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        return (p if self.chosen is None else p[:, self.chosen]), rows


def draft_loss_and_grad(
    z: Tensor, p: Tensor | None, y: Tensor, alpha: float, beta: float
) -> tuple[Tensor, ...]:
    """The losses of a chunk (c,), their gradients by z (c, v), the acceptances (c,), and whether the
    likeliest tokens are the same, bool (c,); without p the latter are 0.

    Args:
        z: logits of the head, at least float32.
        y: labels, PADDING: none.
    """
    log_q = z.log_softmax(-1)
    q = log_q.exp()
    known = y != PADDING
    at = y.clamp(min=0)[:, None]
    values = -alpha * log_q.gather(1, at)[:, 0] * known
    dz = alpha * (q - torch.zeros_like(q).scatter_(1, at, 1.0)) * known[:, None]
    if p is None:
        return values, dz, values.new_zeros(len(z)), known & False
    below = (q < p).to(q.dtype)
    a = torch.minimum(p, q).sum(-1)
    values += 2.0 * beta * (1.0 - a)
    dz += 2.0 * beta * (dot(below, q)[:, None] - below) * q
    return values, dz, a, z.argmax(-1) == p.argmax(-1)


def draft_loss(
    hidden: Tensor,
    head: Head,
    targets: DraftTargets,
    weights: Tensor,
    *,
    latent: Tensor | None = None,
    bias: Tensor | None = None,
    alpha: float,
    beta: float,
    compare: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of w L, differentiable by hidden states, latents and W2; a (n,); and the agreements (n,).

    Args:
        hidden: h.
        head: of the draft's logits, frozen.
        weights: w (n,).
        latent: e; None: no Markov head.
        bias: W2.
        compare: whether the target's head is run; needed for beta.
    """
    inputs = [x if x is None or torch.is_grad_enabled() else x.detach() for x in (hidden, latent, bias)]
    loss, a, same = _DraftLoss.apply(*inputs, head, targets, weights, alpha, beta, compare)
    return loss, a, same


class _DraftLoss(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        latent: Tensor | None,
        bias: Tensor | None,
        head: Head,
        targets: DraftTargets,
        weights: Tensor,
        alpha: float,
        beta: float,
        compare: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        product = product_type(hidden)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        sources, learns = (hidden, latent, bias), any(ctx.needs_input_grad[:3])
        gradients = [None if x is None else torch.zeros_like(x, dtype=wide) for x in sources]
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        accepted = torch.zeros(len(hidden), dtype=wide, device=hidden.device)
        agreed = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            h, cast_head = hidden.detach().to(product), head.to(product)
            pair = None
            if latent is not None and bias is not None:
                pair = latent.detach().to(product), bias.detach().to(product)
            goal = replace(targets, head=targets.head.to(product))
            rows = max(1, BYTES // (4 * max(len(cast_head.weight), len(goal.head.weight))))
            for start in range(0, len(hidden), rows):
                part = slice(start, min(start + rows, len(hidden)))
                z = cast_head.logits(h[part])
                base = z.clone() if cast_head.softcap else z
                if pair is not None:
                    z.addmm_(pair[0][part], pair[1].T)
                values, accepted[part], agreed[part] = _weighted_loss_and_grad(
                    z, goal, part, weights[part], alpha, beta, compare
                )
                total += values.sum(dtype=torch.float64)
                if learns:
                    _add_products(gradients, part, cast_head, base, z, pair)
        ctx.gradients, ctx.types = gradients, [None if x is None else x.dtype for x in sources]
        ctx.mark_non_differentiable(accepted, agreed)
        return total.to(wide), accepted, agreed

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.gradients, ctx.types, strict=True)
        scaled = [None if g is None else g.mul_(upstream[0].to(g.dtype)).to(dtype) for g, dtype in pairs]
        ctx.gradients = None
        return (*scaled, None, None, None, None, None, None)


def _weighted_loss_and_grad(
    z: Tensor, goal: DraftTargets, part: slice, weights: Tensor, alpha: float, beta: float, compare: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted losses, acceptances and agreements of a chunk (c,); its logits become weighted gradients."""
    wide = torch.promote_types(z.dtype, torch.float32)
    values, accepted = (torch.zeros(len(z), dtype=wide, device=z.device) for _ in range(2))
    agreed, labels = torch.zeros(len(z), dtype=torch.bool, device=z.device), goal.labels[part]
    known = goal.probabilities(part, z.dtype) if compare else None
    size = rows_at_once(z)
    for start in range(0, len(z), size):
        few = slice(start, start + size)
        p = None if known is None else known[0][known[1][few]]
        losses, dz, accepted[few], agreed[few] = draft_loss_and_grad(
            z[few].to(wide), p, labels[few], alpha, beta
        )
        values[few] = losses * weights[few]
        z[few] = dz.mul_(weights[few, None]).to(z.dtype)
    return values, accepted, agreed


def _add_products(
    gradients: list[Tensor | None],
    part: slice,
    head: Head,
    base: Tensor,
    dz: Tensor,
    pair: tuple[Tensor, Tensor] | None,
) -> None:
    """Go back from the gradients of a chunk to hidden states, latents and W2.

    Args:
        base: what the head's own logits were; read where it has a soft cap.
        pair: e and W2.
    """
    dhidden, dlatent, dbias = gradients
    if pair is not None and dlatent is not None and dbias is not None:
        dlatent[part] = dz @ pair[1]
        dbias += dz.T @ pair[0][part]
    if dhidden is not None:
        dhidden[part] = head.backward(base, dz) @ head.weight
