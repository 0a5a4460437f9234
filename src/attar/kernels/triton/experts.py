"""Products of a mixture's experts: each pair of a token and its expert is multiplied by that expert's weight.

Letters: P pairs, sorted by expert; E experts; K inputs, N outputs. Expert e has the places [ends[e - 1],
ends[e]) of ``order``. A program finds its expert and its places in memory, from ``ends`` alone: the number
of programs is a bound by P and E, and those without places end at once. So no count is read by the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attar.kernels.triton.codes_tile import split_sum
from attar.kernels.triton.gemm import (
    DENSE,
    STAGES,
    code_tile_of,
    dense_sum,
    row_tile,
    zeros_kind,
)


@triton.jit
def places_of(ends, order, number, E, gather, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """Of tile ``number``: its expert (E: none), rows of x, rows of y, and their mask (ROWS,)."""
    e = tl.arange(0, EXPERTS)
    last = tl.load(ends + e, mask=e < E, other=0)
    first = tl.load(ends + e - 1, mask=(e > 0) & (e < E), other=0)
    tiles = tl.where(e < E, (last - first + ROWS - 1) // ROWS, 0)
    until = tl.cumsum(tiles, 0)
    expert = tl.sum(((until <= number) & (e < E)).to(tl.int32), 0)
    mine = e == expert
    start = tl.sum(tl.where(mine, first + (number - until + tiles) * ROWS, 0), 0)
    stop = tl.sum(tl.where(mine, last, 0), 0)
    rows = start + tl.arange(0, ROWS)
    inside = rows < stop
    pairs = tl.load(order + rows, mask=inside, other=0)
    return (
        expert,
        tl.where(gather > 0, pairs // tl.maximum(gather, 1), rows),
        tl.where(gather > 0, rows, pairs),
        inside,
    )


@triton.jit
def experts_kernel(
    x, words, scales, zeros, bias, order, ends, y, N, K, E, gather,
    G: tl.constexpr, BITS: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """A tile (ROWS, COLUMNS) of y, of one expert."""
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    expert, sources, targets, known = places_of(ends, order, tl.program_id(1), E, gather, ROWS, EXPERTS)
    if expert < E:
        inside, row_mask = n < N, known[:, None]
        of = expert.to(tl.int64)
        groups = of * (K // G) * N
        total = split_sum(
            x + sources.to(tl.int64)[:, None] * K, row_mask,
            words + of * (K // 32 * BITS) * N, scales + groups, zeros + groups,
            K, N, n, inside, 0, K // G, G, BITS, ZEROS, ROWS, COLUMNS, INNER,
        )  # fmt: skip
        if BIAS:
            total += tl.load(bias + of * N + n, mask=inside, other=0.0)[None, :]
        to = y + targets.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(to, total.to(y.dtype.element_ty), mask=row_mask & inside[None, :])


@triton.jit
def dense_experts_kernel(
    x, weight, bias, order, ends, y, N, K, E, gather,
    WIDE: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """The same for dense weights (E, N, K)."""
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    expert, sources, targets, known = places_of(ends, order, tl.program_id(1), E, gather, ROWS, EXPERTS)
    if expert < E:
        inside, row_mask = n < N, known[:, None]
        of = expert.to(tl.int64)
        rows = x + sources.to(tl.int64)[:, None] * K
        outputs = weight + (of * N + n)[:, None] * K
        total = dense_sum(rows, row_mask, outputs, inside, 0, K, WIDE, ROWS, COLUMNS, INNER)
        if BIAS:
            total += tl.load(bias + of * N + n, mask=inside, other=0.0)[None, :]
        to = y + targets.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(to, total.to(y.dtype.element_ty), mask=row_mask & inside[None, :])


def experts_product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    order: Tensor,
    ends: Tensor,
    bits: int,
    gather: int,
) -> Tensor:
    """y (P, N) of x (R, K) and codes (E, K bits / 32, N); arguments as in ``kernels/device``."""
    K, (E, _, N), P = x.shape[1], codes.shape, len(order)
    G = K // scales.shape[1]
    tile = code_tile_of(G, bits)
    rows = row_tile(P // E, tile)
    y = torch.empty(P, N, dtype=x.dtype, device=x.device)
    experts_kernel[_grid(N, tile.columns, P, E, rows)](
        x, codes, scales, codes if zeros is None else zeros, x if bias is None else bias, order, ends, y,
        N, K, E, gather, G, bits, zeros_kind(zeros), bias is not None,
        rows, tile.columns, tile.inner, triton.next_power_of_2(E), num_warps=tile.warps,
        num_stages=STAGES,
    )  # fmt: skip
    return y


def experts_dense(
    x: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor, ends: Tensor, gather: int
) -> Tensor:
    """y (P, N) of x (R, K) and weights (E, N, K)."""
    (E, N, K), P = weight.shape, len(order)
    rows = row_tile(P // E, DENSE)
    y = torch.empty(P, N, dtype=x.dtype, device=x.device)
    dense_experts_kernel[_grid(N, DENSE.columns, P, E, rows)](
        x, weight, x if bias is None else bias, order, ends, y, N, K, E, gather,
        x.dtype != weight.dtype, bias is not None,
        rows, DENSE.columns, DENSE.inner, triton.next_power_of_2(E), num_warps=DENSE.warps, num_stages=STAGES,
    )  # fmt: skip
    return y


def _grid(N: int, columns: int, P: int, E: int, rows: int) -> tuple[int, int]:
    """Tiles of outputs, and a bound on the tiles of places: each expert may have one that is not full."""
    return triton.cdiv(N, columns), min(P, P // rows + E)
