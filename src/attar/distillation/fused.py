"""From hidden states to a loss without the logits: chunks of tokens go through the head, the loss and back,
all in the forward pass (the idea of Hsu et al. 2024, "Liger Kernel", arXiv 2410.10989, section 3.2.2, for any
loss).

    for each chunk:  z = head(h);  (values, dz) = chunk_loss(z);  dh = dz W;  dW += dz^T h

Only a chunk of the logits [n, V] exists at any time: 64 MB, or half of what dW takes, where that is more,
because dW is read and written once a chunk. With a weight (or hidden states) that is not trained, its product
is not computed; without gradients only the loss is.

Letters: n predictions, H hidden size, V vocabulary; h (n, H) hidden states; W (V, H), b (V,) of the head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attar.distillation.objectives.chunked import BYTES, ChunkLoss
from attar.models.head import Head, product_type

ROWS = 16  # of a chunk, at least
CACHED = 1 << 21  # elements of a product that is added to dW


def head_loss(hidden: Tensor, head: Head, chunk_loss: ChunkLoss, weights: Tensor | None = None) -> Tensor:
    """The mean of ``chunk_loss`` over tokens: a scalar in at least float32, 0 for no tokens.

    Args:
        hidden: (n, H); receives a gradient, as do the head's weight and bias.
        head: of the model that made them.
        chunk_loss: see :data:`attar.distillation.objectives.chunked.ChunkLoss`.
        weights: (n,) of the tokens: the result is sum w L / n; None: 1.
    """
    inputs = [hidden, head.weight, head.bias]
    if not torch.is_grad_enabled():
        inputs = [None if x is None else x.detach() for x in inputs]
    loss: Tensor = _HeadLoss.apply(*inputs, head, chunk_loss, weights)
    return loss


def chunk_rows(n: int, weight: Tensor, free: int | None = None) -> int:
    """Tokens of a chunk, whose logits are of the weight's type.

    Args:
        free: bytes of a GPU; None: as it is. A chunk takes at most a 64th of them, a power of two, so that
            the same card makes the same sums.
    """
    V, H = (int(size) for size in weight.shape)
    size = max(BYTES, 2 * V * H)  # dW is in float32
    if free is None and weight.is_cuda:
        free = torch.cuda.mem_get_info(weight.device)[0]
    if free is not None:
        size = 1 << max(free // 64, 1).bit_length() - 1
    return max(1, min(n, max(ROWS, size // (int(weight.element_size()) * V))))


class _HeadLoss(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        chunk_loss: ChunkLoss,
        weights: Tensor | None,
    ) -> Tensor:
        sources = (hidden, weight, bias)
        needed = zip(sources, ctx.needs_input_grad, strict=False)
        gradients = [_accumulator(x) if x is not None and need else None for x, need in needed]
        total = _run(hidden, head, chunk_loss, weights, gradients)
        ctx.count, ctx.types = max(len(hidden), 1), [x.dtype if x is not None else None for x in sources]
        ctx.gradients = gradients
        return (total / ctx.count).to(torch.promote_types(hidden.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        factor = upstream[0] / ctx.count
        pairs = zip(gradients, ctx.types, strict=True)
        scaled = (None if g is None else g.mul_(factor.to(g.dtype)).to(dtype) for g, dtype in pairs)
        return (*scaled, None, None, None)


def _accumulator(x: Tensor) -> Tensor:
    """Zeros in the shape of a tensor, in at least float32."""
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))


def _run(
    hidden: Tensor,
    head: Head,
    chunk_loss: ChunkLoss,
    weights: Tensor | None,
    gradients: list[Tensor | None],
) -> Tensor:
    """The sum of the losses, float64; adds its gradients by hidden states, weight and bias, where they are
    wanted. Products in the type of autocast, or of the hidden states."""
    product = product_type(hidden)
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        h, cast = hidden.detach().to(product), head.to(product)
        rows = chunk_rows(len(hidden), cast.weight)
        for start in range(0, len(hidden), rows):
            part = slice(start, min(start + rows, len(hidden)))
            z = cast.logits(h[part])
            logits = z.clone() if head.softcap else z
            values, dz = chunk_loss(z, part)
            if weights is not None:
                values, dz = values * weights[part], dz.mul_(weights[part, None])
            total += values.sum(dtype=torch.float64)
            _add_gradients(gradients, part, cast.backward(logits, dz.to(product)), h[part], cast.weight)
    return total


def _add_gradients(gradients: list[Tensor | None], part: slice, dz: Tensor, h: Tensor, W: Tensor) -> None:
    """Go back through the Linear: products in the type of W, sums in that of the gradients."""
    dhidden, dweight, dbias = gradients
    if dhidden is not None:
        dhidden[part] = dz @ W
    if dweight is not None:
        _add_product(dweight, dz, h)
    if dbias is not None:
        dbias += dz.sum(0, dtype=dbias.dtype)


def _add_product(dweight: Tensor, dz: Tensor, h: Tensor) -> None:
    """dW += dz^T h. Where the product is narrower than the sum, on a CPU some rows at a time, so that it is
    added while a cache holds it."""
    if dweight.dtype == h.dtype:
        dweight.addmm_(dz.T, h)
        return
    rows = max(1, CACHED // h.shape[1]) if h.device.type == "cpu" else len(dweight)
    for start in range(0, len(dweight), rows):
        dweight[start : start + rows] += dz[:, start : start + rows].T @ h
