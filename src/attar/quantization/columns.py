"""The loop of the second-order roundings: one column after the other, each error corrected in the columns
that are not rounded yet.

    for column i:   q_i = round(w_i) ;  e_i = (w_i - q_i) / U_ii ;  w_j -= e_i U_ij   for j > i

Letters: W (N, K) weight, N outputs, K inputs; U (K, K) upper triangular; E (B, N) errors of a block of B
columns.

Inside a block the loop is compiled (kernels/columns.py) for grids with a code book, and in torch for others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attar.kernels import columns as kernel
from attar.quantization.grids import Grid, QuantizedTensor, TileParameters
from attar.quantization.hessian import HessianFactor

BLOCK = 128  # B: columns whose updates are applied to the rest in one matrix product


@dataclass(frozen=True)
class RoundingResult:
    """What a second-order rounding returns.

    Attributes:
        damp: lambda that was used, as a fraction of the Hessian's mean diagonal.
        dead: number of columns without any input.
    """

    quantized: QuantizedTensor
    damp: float
    dead: int


def round_columns(
    W: Tensor,
    U: Tensor,
    grid: Grid,
    parameters: TileParameters,
    group: Tensor,
    mask: Tensor | None = None,
    first: Tensor | None = None,
) -> Tensor:
    """Codes (N, K), float32, of the columns from left to right; W is not modified.

    Works on transposed blocks, so that a column is contiguous. Inside a block a column is corrected just
    before it is rounded; the columns after the block are corrected in one matrix product.

    Args:
        W: (N, K) float32.
        U: (K, K) upper triangular.
        parameters: (N, G), a row for each output.
        group: int64 (K,), the tile that each column belongs to.
        mask: bool (N, K); False: stays zero.
        first: (N,), rounded in place of W's first column; the error is still taken from W's.
    """
    columns = W.shape[1]
    Wt = W.T.clone(memory_format=torch.contiguous_format)
    codes = torch.empty_like(Wt)
    kept = None if mask is None else mask.T.contiguous()
    tiles = compiled_tiles(grid, parameters, group)
    across = parameters.map(lambda value: value.T)
    for start in range(0, columns, BLOCK):
        at = slice(start, min(start + BLOCK, columns))
        block, factor = Wt[at], U[at, at].contiguous()
        errors, zeros = torch.empty_like(block), None if kept is None else kept[at]
        decided = first.contiguous() if first is not None and start == 0 else None
        if tiles is not None:
            kernel.round_block(tiles, at, block, factor, codes[at], errors, mask=zeros, first=decided)
        else:
            spread = across.map(lambda value, at=group[at]: value[at].contiguous())  # type: ignore[misc]
            _round_in_torch(grid, spread, block, factor, codes[at], errors, zeros, decided)
        if at.stop < columns:
            Wt[at.stop :].addmm_(U[at, at.stop :].T, errors, alpha=-1.0)
    return codes.T


def in_original_order(
    codes: Tensor, factor: HessianFactor, grid: Grid, parameters: TileParameters
) -> RoundingResult:
    """Codes (N, K) in rounding order as a result in the weight's column order."""
    restored = torch.empty(codes.shape, dtype=grid.code_dtype, device=codes.device)
    restored[:, factor.order] = codes.to(grid.code_dtype)
    return RoundingResult(QuantizedTensor(grid, restored, parameters), factor.damp, int(factor.dead.sum()))


def compiled_tiles(grid: Grid, parameters: TileParameters, group: Tensor) -> kernel.TileScales | None:
    """Scales as the compiled loop takes them; None where it does not support the grid, or does not run.

    Args:
        parameters: (N, G), a row for each output.
        group: int64 (K,).
    """
    book = grid.code_book()
    if book is None or not kernel.available(parameters.scale.device):
        return None
    across = parameters.map(lambda value: value.float().T.contiguous())
    return kernel.TileScales(book, across.scale, across.zero, across.minimum, group)


def _round_in_torch(
    grid: Grid,
    spread: TileParameters,
    block: Tensor,
    factor: Tensor,
    codes: Tensor,
    errors: Tensor,
    mask: Tensor | None = None,
    first: Tensor | None = None,
) -> None:
    """The same as :func:`attar.kernels.columns.round_block`, for any grid and device.

    Args:
        spread: parameters (B, N), a row for each column of the block.
    """
    steps = factor.diagonal().reciprocal().tolist()
    for i, step in enumerate(steps):
        column = block[i]
        if i:
            column = torch.addmv(column, errors[:i].T, factor[:i, i], alpha=-1.0)
        at = spread.map(lambda value, i=i: value[i])  # type: ignore[misc]
        target = first if i == 0 and first is not None else column
        if mask is not None:
            target = target * mask[i]
        codes[i] = grid.encode(target, at)
        torch.mul(column - grid.decode(codes[i], at), step, out=errors[i])
