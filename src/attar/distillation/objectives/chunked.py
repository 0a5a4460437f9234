"""From an objective's gradients to a loss, a block of tokens at a time.

An objective is ``loss_and_grad(z, t, T, **options) -> (values, dz)``: the loss of each token, and its
gradient by the student's logits. Both are written down in the forward pass, so that no tensor of the logits'
size but the gradient ever exists; from hidden states not even that does (``distillation/fused.py``).

Letters: z (n, V) student's logits; t (n, V) teacher's; T temperature. An objective gets a block of them in at
least float32, and does not change them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LossAndGrad = Callable[..., tuple[Tensor, Tensor]]
"""``loss_and_grad(z, t, T, **options)`` to ``(values (c,), dz (c, V))``, dz of the sum of the values."""

ChunkLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""``chunk_loss(z, part)``: logits (c, V) of the tokens ``part``, in the type of the product that made them
(bf16 under autocast), to their losses (c,) in at least float32 and gradients (c, V). It may overwrite z, and
leave the gradients there: :func:`blockwise` with ``out=z``."""

BYTES = 1 << 26  # of a chunk's logits in float32
CACHED, LARGE = 1 << 17, 1 << 25
"""Logits of a block: on a CPU for each thread as many as its cache holds some copies of, elsewhere enough to
keep the device busy."""


def rows_at_once(z: Tensor) -> int:
    """Tokens of a block of logits (n, V): at least 1."""
    size = CACHED * int(torch.get_num_threads()) if z.device.type == "cpu" else LARGE
    return max(1, size // max(int(z.shape[-1]), 1))


def blockwise(
    objective: LossAndGrad,
    z: Tensor,
    *teacher: Tensor,
    T: float = 1.0,
    out: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """An objective over logits (n, V) of any float type, block after block: values (n,) in at least float32,
    and gradients (n, V) in the logits' type.

    Args:
        objective: its loss and gradient.
        teacher: what it reads of the teacher, n rows each: logits; targets; tokens, weights, entropy.
        out: where the gradients go; may be z, which is overwritten then.
    """
    gradient = torch.empty_like(z) if out is None else out
    values = z.new_empty(len(z), dtype=torch.promote_types(z.dtype, torch.float32))
    rows = rows_at_once(z)
    with torch.autocast(z.device.type, enabled=False):
        for start in range(0, len(z), rows):
            part = slice(start, start + rows)
            values[part], gradient[part] = objective(
                wide(z[part]), *(wide(x[part]) for x in teacher), T, **options
            )
    return values, gradient


def wide(x: Tensor) -> Tensor:
    """Numbers in at least float32; tokens as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32)) if x.is_floating_point() else x


def mean_of_chunks(chunk_loss: ChunkLoss, z: Tensor, rows: int | None = None) -> Tensor:
    """The mean of ``chunk_loss`` over the tokens of logits (..., V), differentiable by them. Where a
    head makes them of hidden states, :func:`attar.distillation.fused.head_loss` does without them.

    Args:
        rows: tokens of a chunk; None: of about :data:`BYTES`.
    """
    mean: Tensor = _MeanOfChunks.apply(z if torch.is_grad_enabled() else z.detach(), chunk_loss, rows)
    return mean


class _MeanOfChunks(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, z: Tensor, chunk_loss: ChunkLoss, rows: int | None) -> Tensor:
        gradient = z.reshape(-1, z.shape[-1]).clone()
        total = torch.zeros((), dtype=torch.float64, device=z.device)
        rows = rows or max(1, BYTES // (4 * z.shape[-1]))
        for start in range(0, len(gradient), rows):
            part = slice(start, min(start + rows, len(gradient)))
            values, dz = chunk_loss(gradient[part], part)
            total += values.sum(dtype=torch.float64)
            if dz.data_ptr() != gradient[part].data_ptr():
                gradient[part] = dz
        ctx.count = max(len(gradient), 1)
        ctx.save_for_backward(gradient.reshape(z.shape))
        return (total / ctx.count).to(torch.promote_types(z.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * (upstream[0] / ctx.count).to(gradient.dtype), None, None
