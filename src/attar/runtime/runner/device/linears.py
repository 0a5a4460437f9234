"""Which kernel multiplies by a weight: a pure function of shapes, bits and the device.

torch     the operators' bodies, float32 sums: the CPU, and any device without other kernels
triton    attar's kernels (kernels/triton), whose sums do not depend on the number of rows
cublas    torch's own product of dense weights: where there is no Triton, and where it was measured to be
          faster and a batch may change a text (product_times.py)
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from attar.kernels.device.native import native_product
from attar.kernels.device.products import dense_product, experts_dense, experts_product, packed_product
from attar.runtime.runner.device.layout import DENSE, DeviceWeight

ProductKernel = Literal["torch", "triton", "cublas"]
Capability = tuple[int, int]
FIRST = (8, 0)  # capability from which the Triton kernels are compiled


def product_kernel(bits: int, capability: Capability | None, *, triton: bool) -> ProductKernel:
    """The kernel of a weight.

    Args:
        bits: of a code; DENSE: none.
        capability: of a CUDA device; None: another device.
        triton: whether Triton's kernels are there.
    """
    if capability is None:
        return "torch"
    if triton and capability >= FIRST:
        return "triton"
    return "cublas" if bits == DENSE else "torch"


def multiply(weight: DeviceWeight, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """x (M, K) times W^T, and the bias: (M, N), of x's dtype or another."""
    dtype = out_dtype or x.dtype
    if weight.kernel == "cublas":
        return native_product(x, weight.data, weight.bias, dtype)
    if weight.scales is None:
        return dense_product(x, weight.data, weight.bias, dtype)
    return packed_product(x, weight.data, weight.scales, weight.zeros, weight.bias, weight.bits, dtype)


def multiply_experts(weight: DeviceWeight, x: Tensor, order: Tensor, ends: Tensor, gather: int) -> Tensor:
    """Of the pairs of tokens and experts; see :func:`attar.kernels.device.products.experts_product`."""
    if weight.scales is None:
        return experts_dense(x, weight.data, weight.bias, order, ends, gather)
    codes = weight.data, weight.scales, weight.zeros
    return experts_product(x, *codes, weight.bias, order, ends, weight.bits, gather)
