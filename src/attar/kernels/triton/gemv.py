"""The second stage of a product of few rows: the sums of its splits are added in order.

The first stage is a program for each tile of outputs and each split of K (gemm.py), so that one row keeps
the whole card reading. Nothing is added by atomics: the same input gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 256  # of y in a program


@triton.jit
def sum_kernel(sums, bias, y, size, N, count, BIAS: tl.constexpr, NUMBERS: tl.constexpr):
    """y = ((0 + sums_0) + sums_1) + ... + bias for numbers of y, flat."""
    at = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    inside = at < size
    total = tl.zeros((NUMBERS,), tl.float32)
    for split in range(count):
        total += tl.load(sums + split * size + at, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + at % N, mask=inside, other=0.0)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)


def sum_splits(sums: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """y (M, N) of the sums float32 (splits, M, N) and a bias float32 (N,)."""
    count, M, N = sums.shape
    y = torch.empty(M, N, dtype=out_dtype, device=sums.device)
    grid = (triton.cdiv(M * N, NUMBERS),)
    sum_kernel[grid](sums, sums if bias is None else bias, y, M * N, N, count, bias is not None, NUMBERS)
    return y
