"""From an objective's slopes to a loss of logits that autograd knows.

An objective is ``slopes(z, t, T, **options) -> (values, dz)`` of a chunk of c tokens: the loss of each, and
its gradient by the student's logits. Both are written down in the forward pass, chunk by chunk, so that
one more tensor of the logits' size is all that ever exists; from hidden states not even the logits do
(``distillation/fused.py``).

Letters: z (c, V) student's logits; t (c, V) teacher's; T temperature. Both are at least float32 and scratch:
an objective may overwrite them, and dz may lie in the memory of either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Slopes = Callable[..., tuple[Tensor, Tensor]]
"""``slopes(z, t, T, **options)`` to ``(values (c,), dz (c, V))``, dz of the sum of the values."""

CACHED, LARGE = 1 << 19, 1 << 25
"""Logits that an objective sees at once: on a CPU a block that its caches hold, elsewhere one that keeps the
device busy."""


def rows_at_once(z: Tensor) -> int:
    """Tokens of a block of logits (n, V): at least 1."""
    return max(1, (CACHED if z.device.type == "cpu" else LARGE) // max(z.shape[-1], 1))


def on_logits(slopes: Slopes, z: Tensor, t: Tensor, T: float = 1.0, **options: Any) -> Tensor:
    """The mean of an objective over tokens; a scalar, float32 (float64 for float64 logits), 0 for no tokens.

    Args:
        slopes: of the objective.
        z: (..., V) student's logits, any float type; receives the gradient. Not changed.
        t: (..., V) teacher's logits of the same shape, or targets int64 (...) for hard labels.
        T: temperature.
        options: of the objective.
    """
    assert t.shape == z.shape or t.shape == z.shape[:-1], (z.shape, t.shape)
    targets = t.detach().reshape(-1, t.shape[-1]) if t.dim() == z.dim() else t.reshape(-1)

    def chunk_loss(chunk: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        return slopes(chunk, scratch(targets[part]), T, **options)

    return mean_of_chunks(chunk_loss, z)


def mean_of_chunks(chunk_loss: Callable[[Tensor, slice], tuple[Tensor, Tensor]], z: Tensor) -> Tensor:
    """The mean of ``chunk_loss(z[part], part)`` over the tokens of logits (..., V), differentiable by them.

    Args:
        chunk_loss: of scratch logits (c, V) and the tokens that they belong to: values and slopes.
        z: any float type; not changed.
    """
    loss: Tensor = _MeanOfChunks.apply(z, chunk_loss)
    return loss


def scratch(x: Tensor) -> Tensor:
    """A copy in at least float32, which may be overwritten; tokens stay as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=True) if x.is_floating_point() else x


class _MeanOfChunks(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, z: Tensor, chunk_loss: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        flat = z.reshape(-1, z.shape[-1])
        gradient = torch.empty_like(flat) if ctx.needs_input_grad[0] else None
        total = torch.zeros((), dtype=torch.float64, device=z.device)
        count, rows = max(len(flat), 1), rows_at_once(flat)
        with torch.autocast(z.device.type, enabled=False):
            for start in range(0, len(flat), rows):
                part = slice(start, start + rows)
                values, dz = chunk_loss(scratch(flat[part]), part)
                total += values.sum(dtype=torch.float64)
                if gradient is not None:
                    gradient[part] = dz.div_(count)
        ctx.gradient = None if gradient is None else gradient.reshape(z.shape)
        return (total / count).to(torch.promote_types(z.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient * upstream[0].to(ctx.gradient.dtype), None
