"""y = x W^T for quantized and for dense weights, and for any number of rows.

    total_j = sum over the inputs of split j ;   y = ((total_0 + total_1) + total_2) + ... + bias

Letters: M rows, K inputs, N outputs, G inputs of a scale. K is divided into splits by (N, K) alone. Few
rows (decode) take a program for each split, so that the whole card reads the weight, and a second launch
that adds their sums in order (gemv.py). Many rows take one program for all splits. The sums and their order
are the same: a row's bits do not depend on how many rows are multiplied.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attar.kernels.triton.codes_tile import split_sum
from attar.kernels.triton.gemv import sum_splits

FEW = 64  # rows, at most, that a program for each split is launched for
PROGRAMS = 512  # wanted of a weight: about four for each processor of a large card
LEAST = 512  # inputs of a split
STAGES = 4  # tiles of weights on their way


class Tile(NamedTuple):
    """How a program reads codes: each thread four words, 16 bytes, of the widest plane.

    Attributes:
        inner: inputs of a tile.
        columns: outputs of a tile.
        warps: of 32 threads.
        rows: of x, at most.
    """

    inner: int
    columns: int
    warps: int
    rows: int


DENSE = Tile(64, 64, 4, 32)  # of a weight that has no codes


def code_tile_of(G: int, bits: int) -> Tile:
    """The tile of codes of ``bits`` in groups of G inputs.

    Fewer than four warps, and the planes of 6 and 7 bits, leave no registers for 32 rows. On sm_80, 7 bits
    with whole zero points spill 8 bytes of a thread even at 16 rows.
    """
    widest = 8 if bits == 8 else 4 if bits >= 4 else 2
    inner = min(G, 64 if widest >= 4 else 128)
    columns = 64 if inner * widest >= 256 else 128
    warps = max(1, min(4, inner * widest * columns // 4096))
    return Tile(inner, columns, warps, 32 if warps == 4 and bits not in (6, 7) else 16)


def splits(N: int, K: int, G: int, columns: int) -> tuple[int, int]:
    """How K is divided: the number of splits, and groups of G inputs in each but the last."""
    groups = -(-K // G)
    wanted = max(1, min(-(-PROGRAMS * columns // N), K // LEAST))
    size = -(-groups // wanted)
    return -(-groups // size), size


def row_tile(M: int, tile: Tile) -> int:
    """Rows of a program: 16 or 32, both mma.m16n8k16."""
    return 16 if M <= 16 else tile.rows


def zeros_kind(zeros: Tensor | None) -> str:
    """How zero points are stored, for the kernels."""
    if zeros is None:
        return "none"
    return "real" if zeros.dtype.is_floating_point else "whole"


@triton.jit
def product_kernel(
    x, words, scales, zeros, bias, y, M, N, K, size, count,
    G: tl.constexpr, BITS: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A tile (ROWS, COLUMNS) of y; with SPLIT of one split's sums, y being float32 (splits, M, N).

    Args:
        size: groups of a split; count: splits.
    """
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside, row_mask = n < N, (m < M)[:, None]
    rows = x + m.to(tl.int64)[:, None] * K
    first_split, last_split = 0, count
    if SPLIT:
        first_split = tl.program_id(2)
        last_split = first_split + 1
        y += first_split * M * N
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for split in range(first_split, last_split):
        last = tl.minimum((split + 1) * size, K // G)
        total += split_sum(
            rows, row_mask, words, scales, zeros, K, N, n, inside, split * size, last,
            G, BITS, ZEROS, ROWS, COLUMNS, INNER,
        )  # fmt: skip
    if BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0)[None, :]
    to = y + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(to, total.to(y.dtype.element_ty), mask=row_mask & inside[None, :])


def packed_product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    bits: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """y (M, N) of x (M, K); arguments as in ``kernels/device``."""
    (M, K), N, G = x.shape, codes.shape[1], x.shape[1] // scales.shape[0]
    tile = code_tile_of(G, bits)
    count, size = splits(N, K, G, tile.columns)
    split, rows = count > 1 and M <= FEW, row_tile(M, tile)
    y = _output(x, M, N, count if split else 0, out_dtype)
    grid = (triton.cdiv(N, tile.columns), triton.cdiv(M, rows), count if split else 1)
    product_kernel[grid](
        x, codes, scales, codes if zeros is None else zeros, x if bias is None else bias, y,
        M, N, K, size, count, G, bits, zeros_kind(zeros), bias is not None and not split, split,
        rows, tile.columns, tile.inner, num_warps=tile.warps, num_stages=STAGES,
    )  # fmt: skip
    return sum_splits(y, bias, out_dtype) if split else y


@triton.jit
def dense_sum(
    x, row_mask, weight, inside, first_input, last_input,
    WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """The product of rows with inputs [first_input, last_input), float32 (ROWS, COLUMNS).

    Args:
        x, weight: pointers (ROWS, 1) and (COLUMNS, 1) to the first inputs of rows and outputs.
        WIDE: multiply in float32.
    """
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(first_input, last_input, INNER):
        k = first + tl.arange(0, INNER)
        known = (k < last_input)[None, :]
        rows = tl.load(x + k[None, :], mask=row_mask & known, other=0.0)
        tile = tl.load(weight + k[None, :], mask=inside[:, None] & known, other=0.0)
        if WIDE:
            rows, tile = rows.to(tl.float32), tile.to(tl.float32)
        total = tl.dot(rows, tl.trans(tile), total, input_precision="ieee")
    return total


@triton.jit
def dense_kernel(
    x, weight, bias, y, M, N, K, size, count,
    WIDE: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """The same for a dense weight (N, K); size: tiles of INNER inputs in a split."""
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside, row_mask = n < N, (m < M)[:, None]
    rows, outputs = x + m.to(tl.int64)[:, None] * K, weight + n.to(tl.int64)[:, None] * K
    first_split, last_split = 0, count
    if SPLIT:
        first_split = tl.program_id(2)
        last_split = first_split + 1
        y += first_split * M * N
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for split in range(first_split, last_split):
        last = tl.minimum((split + 1) * size * INNER, K)
        total += dense_sum(
            rows, row_mask, outputs, inside, split * size * INNER, last, WIDE, ROWS, COLUMNS, INNER
        )
    if BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0)[None, :]
    to = y + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(to, total.to(y.dtype.element_ty), mask=row_mask & inside[None, :])


def dense_product(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """y (M, N) of x (M, K) and a weight (N, K), sums in float32."""
    (M, K), N = x.shape, weight.shape[0]
    count, size = splits(N, K, DENSE.inner, DENSE.columns)
    split, half = count > 1 and M <= FEW, x.dtype == weight.dtype != torch.float32
    rows = row_tile(M, DENSE) if half else 16  # float32 takes twice the registers
    y = _output(x, M, N, count if split else 0, out_dtype)
    grid = (triton.cdiv(N, DENSE.columns), triton.cdiv(M, rows), count if split else 1)
    dense_kernel[grid](
        x, weight, x if bias is None else bias, y, M, N, K, size, count,
        x.dtype != weight.dtype, bias is not None and not split, split,
        rows, DENSE.columns, DENSE.inner, num_warps=DENSE.warps, num_stages=STAGES, maxnreg=255,
    )  # fmt: skip
    return sum_splits(y, bias, out_dtype) if split else y


def _output(x: Tensor, M: int, N: int, count: int, dtype: torch.dtype) -> Tensor:
    """Memory for y, or with ``count`` for the sums of as many splits."""
    if count:
        return torch.empty(count, M, N, dtype=torch.float32, device=x.device)
    return torch.empty(M, N, dtype=dtype, device=x.device)
