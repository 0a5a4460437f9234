"""Products of dense weights by torch's own kernels, for devices that have them: cuBLAS in a GPU's case.

Never run on a GPU. Of a matrix product's sums over inputs no order is promised: with dense weights a token's
last bits may depend on its batch.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from attar.kernels.device.products import dense_product, experts_dense
from attar.kernels.device.registry import register_kernel


def native_product(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """As ``dense_product``; rounded to the weight's type before a bias is added."""
    y = F.linear(x.to(weight.dtype), weight)
    return (y if bias is None else y + bias).to(out_dtype)


def native_experts(
    x: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor, ends: Tensor, gather: int
) -> Tensor:
    """As ``experts_dense``, without reading ``ends`` on the host; bfloat16."""
    rows = x[order // gather] if gather else x
    y = F.grouped_mm(rows, weight.mT, offs=ends)
    if bias is not None:
        indices = torch.arange(len(order), device=x.device, dtype=torch.int32)
        y = y + bias[torch.bucketize(indices, ends, right=True)]
    y = y.to(x.dtype)
    return y if gather else torch.empty_like(y).index_copy_(0, order.long(), y)


@functools.cache
def register() -> None:
    """Have CUDA tensors run these."""
    register_kernel(dense_product, native_product)
    register_kernel(experts_dense, native_experts)
