"""The loop over a block of columns on a GPU: what csrc/columns.cpp is on a CPU.

    round:    t_i = w_i - sum_{j<i} F_ij e_j ;              e_i = (t_i - w'_i) step_i
    descend:  t_i = w'_i - step_i (g_i + sum_{j<i} F_ij e_j) ;  e_i = new w'_i - old w'_i
    both:     q_i = nearest((t_i + m) / s + z) ;            w'_i = s (level(q_i) - z) - m

A program has ROWS outputs of the weight and goes through the columns of the block, whose errors stay in its
registers: a block is one launch. What it adds to later blocks is the caller's matrix product.

Letters: N outputs, n columns of the block, everything stored by columns, (n, N); w weights, w' decoded codes,
q codes; g gradient, e errors, F (n, n) what an error in column j does to column i; s, z, m scale, zero and
minimum of a tile, (G, N).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attar.kernels.triton.rounding import round_even

ROWS = 16  # outputs of a program: half a warp's registers hold the errors of 128 columns


@triton.jit
def columns_kernel(
    scale, zeros, minimum, tile, inner, step, gradient, current, mask, first, table, codes, errors,
    N, n, low, high, zero,
    LEVELS: tl.constexpr, ZEROS: tl.constexpr, MINIMUM: tl.constexpr, DESCEND: tl.constexpr,
    MASK: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """ROWS outputs of a block.

    Args:
        LEVELS: of a table, ascending; 0: whole numbers from low to high; -1: codes are real.
        SIZE: a power of two that holds n.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < N
    j = tl.arange(0, SIZE)
    before = tl.zeros((SIZE, ROWS), tl.float32)  # errors of the columns so far
    for i in range(n):
        factor = tl.load(inner + i * n + j, mask=j < i, other=0.0)
        total = tl.sum(before * factor[:, None], 0)
        at, of_tile = i * N + rows, tl.load(tile + i).to(tl.int32) * N + rows
        s = tl.load(scale + of_tile, mask=inside, other=1.0)
        m = tl.load(minimum + of_tile, mask=inside, other=0.0) if MINIMUM else tl.zeros((ROWS,), tl.float32)
        z = (
            tl.load(zeros + of_tile, mask=inside, other=0.0)
            if ZEROS
            else tl.zeros((ROWS,), tl.float32) + zero
        )
        weight = tl.load(current + at, mask=inside, other=0.0)
        by = tl.load(step + i)
        if DESCEND:
            target = weight - (tl.load(gradient + at, mask=inside, other=0.0) + total) * by
        else:
            target = weight - total
        rounded = target
        if FIRST:
            rounded = tl.where(i == 0, tl.load(first + rows, mask=inside, other=0.0), target)
        if MASK:
            rounded = tl.where(tl.load(mask + at, mask=inside, other=0) != 0, rounded, 0.0)
        y = tl.div_rn(rounded + m, s) + z
        if LEVELS < 0:
            code, level = y, y
        elif LEVELS == 0:
            code = round_even(tl.minimum(tl.maximum(y, low), high))
            level = code
        else:
            code = tl.zeros((ROWS,), tl.float32)
            level = code + tl.load(table)
            for q in tl.static_range(1, LEVELS):
                upper = tl.load(table + q)
                above = y >= 0.5 * (tl.load(table + q - 1) + upper)
                code, level = tl.where(above, float(q), code), tl.where(above, upper, level)
        decoded = (level - z) * s - m
        error = decoded - weight if DESCEND else (target - decoded) * by
        tl.store(codes + at, code, mask=inside)
        tl.store(errors + at, error, mask=inside)
        if DESCEND:
            tl.store(current + at, decoded, mask=inside)
        before = tl.where(j[:, None] == i, error[None, :], before)


def run_block(
    levels: tuple[int, ...],
    numbers: tuple[float, float, float],
    real: bool,
    tiles: tuple[Tensor, Tensor | None, Tensor | None, Tensor],
    inner: Tensor,
    step: Tensor,
    gradient: Tensor | None,
    current: Tensor,
    mask: Tensor | None,
    first: Tensor | None,
    codes: Tensor,
    errors: Tensor,
) -> None:
    """Round or, with a gradient, descend a block; all tensors are contiguous float32.

    Args:
        levels, numbers, real: of the code book; numbers are low, high and zero.
        tiles: scale, zeros and minimum (G, N), and the tile int64 (n,) of each column.
        inner: F (n, n), a row for each column that is rounded.
        step: (n,).
        mask: bool (n, N); first: (N,), rounded instead of the first column.
    """
    n, N = current.shape
    scale, zeros, minimum, tile = tiles
    table = _table(levels, current.device) if levels else current
    optional = [current if part is None else part for part in (zeros, minimum, gradient, first)]
    flags = current if mask is None else mask.view(torch.uint8)
    columns_kernel[(triton.cdiv(N, ROWS),)](
        scale, optional[0], optional[1], tile, inner, step, optional[2], current, flags, optional[3], table,
        codes, errors, N, n, *numbers,
        -1 if real else len(levels), zeros is not None, minimum is not None, gradient is not None,
        mask is not None, first is not None, ROWS, triton.next_power_of_2(n), num_warps=1,
    )  # fmt: skip


@cache
def _table(levels: tuple[int, ...], device: torch.device) -> Tensor:
    """The levels on the device, copied once."""
    return torch.tensor(levels, dtype=torch.float32, device=device)
