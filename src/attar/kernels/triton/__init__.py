"""Triton kernels of the device runner: each computes what an op of ``kernels/device`` defines in torch.

They run on CUDA cards since Ampere (sm_80), with the triton that comes with torch, 3.6 or later, and on the
CPU in Triton's interpreter (``TRITON_INTERPRET=1`` in the environment of the process). None of this has
been run on a GPU.

    gemm, gemv   products of quantized and dense weights, for many and for few rows
    experts      the same for a mixture of experts
    route        the choice of its experts, and their pairs in order
    paged        attention over the paged pool
    fused        norms with residual sums, rotary embedding with the write of keys and values, activations
    columns      the loop of GPTQ over a block of columns
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch


def available(device: torch.device) -> bool:
    """Whether the kernels run on a device. Does not import triton."""
    return (device.type == "cuda" or interpreted()) and _installed()


def interpreted() -> bool:
    """Whether this process runs them in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def register() -> None:
    """Have CUDA tensors run these kernels in place of the operators' bodies (``kernels/device``)."""
    from attar.kernels.device import attention, elementwise, products
    from attar.kernels.device.registry import register_kernel
    from attar.kernels.triton import experts, fused, gemm, paged, route

    for operation, kernel in (
        (products.packed_product, gemm.packed_product),
        (products.dense_product, gemm.dense_product),
        (products.experts_product, experts.experts_product),
        (products.experts_dense, experts.experts_dense),
        (attention.rope_write, fused.rope_write),
        (attention.paged_attention, paged.paged_attention),
        (elementwise.add_norm, fused.add_norm),
        (elementwise.gated, fused.gated),
        (elementwise.route, route.route),
    ):
        register_kernel(operation, kernel)


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
