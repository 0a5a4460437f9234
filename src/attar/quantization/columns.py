"""The loop of the second-order roundings: one column after the other, each error corrected in the columns
that are not rounded yet.

    for column i:   q_i = round(w_i) ;  e_i = (w_i - q_i) / U_ii ;  w_j -= e_i U_ij   for j > i

With a sparsity, the weights that become zero are chosen in the loop, from the weights as corrected so far:
those of the smallest w_i^2 / U_ii^2, which is what setting w_i to zero costs (SparseGPT: Frantar & Alistarh
2023, arXiv 2301.00774, algorithm 1). A fraction is chosen among all rows when the loop reaches a block of B
columns; N:M in each row, when it reaches a group of M columns.

Letters: W (N, K) weight, N outputs, K inputs; U (K, K) upper triangular; E (B, N) errors of a block of B
columns.

Inside a block the loop is compiled (kernels/columns.py) for grids with a code book, and in torch for others.
Pruning without quantization is the loop on a :class:`~attar.quantization.grids.real.RealGrid`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attar.kernels import columns as kernel
from attar.quantization.grids import Grid, QuantizedTensor, TileParameters
from attar.quantization.hessian import HessianFactor
from attar.sparsity import Sparsity

BLOCK = 128  # B: columns whose updates are applied to the rest in one matrix product


@dataclass(frozen=True)
class RoundingResult:
    """What a second-order rounding returns.

    Attributes:
        damp: lambda that was used, as a fraction of the Hessian's mean diagonal.
        mask: bool (N, K), False where a weight had to become zero; None: nowhere.
    """

    quantized: QuantizedTensor
    damp: float
    mask: Tensor | None = None

    def restored(self, order: Tensor) -> RoundingResult:
        """Of sorted columns, in the weight's column order; groups follow the sorted one.

        Args:
            order: int64 (K,), the original number of each column.
        """
        mask = None if self.mask is None else _restored(self.mask, order)
        return replace(self, quantized=self.quantized.restored(order), mask=mask)


def round_columns(
    W: Tensor,
    U: Tensor,
    grid: Grid,
    parameters: TileParameters,
    group: Tensor,
    mask: Tensor | None = None,
    first: Tensor | None = None,
    sparsity: Sparsity | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Codes (N, K), float32, of the columns from left to right, and the mask that they have; W is not
    modified.

    Args:
        W: (N, K) float32.
        U: (K, K) upper triangular.
        parameters: (N, G), a row for each output.
        group: int64 (K,), the tile that each column belongs to.
        mask: bool (N, K); False: becomes zero.
        first: (N,), rounded in place of W's first column; the error is still taken from W's.
        sparsity: how many weights become zero, those of the mask first; K is a multiple of M.
    """
    Wt = W.T.clone(memory_format=torch.contiguous_format)
    return round_columns_(Wt, U, grid, parameters, group, mask, first, sparsity)


def round_columns_(
    Wt: Tensor,
    U: Tensor,
    grid: Grid,
    parameters: TileParameters,
    group: Tensor,
    mask: Tensor | None = None,
    first: Tensor | None = None,
    sparsity: Sparsity | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As :func:`round_columns`, in the memory of the transposed weight (K, N), contiguous, which its codes
    take.

    A column is contiguous. Inside a block it is corrected just before it is rounded; the columns after the
    block are corrected in one matrix product.
    """
    columns = len(Wt)
    assert sparsity is None or sparsity.fits(columns)
    kept = None if mask is None else mask.T.contiguous().clone()
    if sparsity is not None and kept is None:
        kept = torch.ones_like(Wt, dtype=torch.bool)
    tiles = compiled_tiles(grid, parameters, group, choosing=sparsity is not None and sparsity.of > 0)
    across = parameters.map(lambda value: value.T)
    width = _block_width(sparsity)
    for start in range(0, columns, width):
        at = slice(start, min(start + width, columns))
        block, factor = Wt[at], U[at, at].contiguous()
        errors, codes = torch.empty_like(block), torch.empty_like(block)
        stays = None if kept is None else kept[at]
        if sparsity is not None and stays is not None and not sparsity.of:
            _narrow(stays, block / factor.diagonal()[:, None], sparsity)
        decided = first.contiguous() if first is not None and start == 0 else None
        if tiles is not None:
            pattern = (sparsity.kept, sparsity.of) if sparsity is not None else (0, 0)
            parts = tiles, at, block, factor, codes, errors
            kernel.round_block(*parts, mask=stays, first=decided, choose=pattern)
        else:
            spread = across.map(lambda value, at=group[at]: value[at].contiguous())  # type: ignore[misc]
            _round_in_torch(grid, spread, block, factor, codes, errors, stays, decided, sparsity)
        if at.stop < columns:
            Wt[at.stop :].addmm_(U[at, at.stop :].T, errors, alpha=-1.0)
        block.copy_(codes)
    return Wt.T, None if kept is None else kept.T


def _narrow(mask: Tensor, costs: Tensor, sparsity: Sparsity) -> None:
    """Take out of a mask (n, N) the weights of least cost (the square root of what zeroing costs), in
    place."""
    scores = costs.abs().masked_fill_(~mask, -1.0)
    mask.logical_and_(sparsity.mask(scores.T).T)


def _block_width(sparsity: Sparsity | None) -> int:
    """B, or the nearest whole groups of M columns."""
    of = sparsity.of if sparsity is not None and sparsity.of else 1
    return max(BLOCK // of, 1) * of


def in_original_order(
    codes: Tensor,
    factor: HessianFactor,
    grid: Grid,
    parameters: TileParameters,
    mask: Tensor | None = None,
) -> RoundingResult:
    """Codes (N, K) in rounding order as a result in the weight's column order; the mask, too."""
    restored = _restored(codes.to(grid.code_dtype), factor.order)
    kept = None if mask is None else _restored(mask, factor.order)
    quantized = QuantizedTensor(grid, restored, parameters)
    return RoundingResult(quantized, factor.damp, kept)


def _restored(columns: Tensor, order: Tensor) -> Tensor:
    """Columns (N, K) back where ``order`` took them from."""
    restored = torch.empty_like(columns, memory_format=torch.contiguous_format)
    restored[:, order] = columns
    return restored


def compiled_tiles(
    grid: Grid, parameters: TileParameters, group: Tensor, *, choosing: bool = False
) -> kernel.TileScales | None:
    """Scales as the compiled loop takes them; None where it does not support the grid, or does not run.

    Args:
        parameters: (N, G), a row for each output.
        group: int64 (K,).
        choosing: the loop chooses N of M, too, which a GPU's does not; nor does it round to floats.
    """
    book, device = grid.code_book(), parameters.scale.device
    if book is None or not kernel.available(device):
        return None
    if device.type != "cpu" and (choosing or book.numbers not in ("", "real")):
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
    sparsity: Sparsity | None = None,
) -> None:
    """The same as :func:`attar.kernels.columns.round_block`, for any grid and device.

    Args:
        spread: parameters (B, N), a row for each column of the block.
    """
    step_of = factor.diagonal().reciprocal()
    of = sparsity.of if sparsity is not None else 0
    for i, step in enumerate(step_of):
        if of and i % of == 0:
            assert sparsity is not None and mask is not None
            ahead = slice(i, i + of)
            current = block[ahead] - factor[:i, ahead].T @ errors[:i]
            _narrow(mask[ahead], current * step_of[ahead, None], sparsity)
        column = block[i]
        if i:
            column = torch.addmv(column, errors[:i].T, factor[:i, i], alpha=-1.0)
        at = spread.map(lambda value, i=i: value[i])  # type: ignore[misc]
        target = first if i == 0 and first is not None else column
        if mask is not None:
            target = target.where(mask[i], 0.0)
        codes[i] = grid.encode(target, at)
        torch.mul(column - grid.decode(codes[i], at), step, out=errors[i])
