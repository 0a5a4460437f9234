"""GPTQ: Frantar, Ashkboos, Hoefler, Alistarh 2022, "GPTQ: Accurate Post-Training Quantization", arXiv
2210.17323, algorithm 1.

    H^-1 = (2 X^T X / T + lambda I)^-1 ,  U = Cholesky(H^-1)^T  (upper)
    for column i:   q_i = round(w_i) ;  e_i = (w_i - q_i) / U_ii ;  w_j -= e_i U_ij   for j > i

Letters: W (N, K) weight, N outputs, K inputs; H (K, K), U (K, K) from hessian.py. The loop over the columns
is in columns.py. With a sparsity it also chooses which weights become zero: SparseGPT's joint pruning and
quantization (arXiv 2301.00774, section 3.4).

Differs from the paper: the parameters are chosen from the weight before any column is rounded, so that with
act-order (columns of the largest H_ii first, from the authors' code) the stored format keeps its column
order ("static" groups). Damping that is too small for a Cholesky is raised tenfold, and the result reports
it. A column whose input was always zero (H_ii = 0) is rounded to nearest; see hessian.py.
"""

from __future__ import annotations

from torch import Tensor

from attar.quantization.columns import RoundingResult, in_original_order, round_columns_
from attar.quantization.grids import Grid, TileParameters
from attar.quantization.hessian import HessianFactor, check_finite, factorize
from attar.sparsity import Sparsity


def gptq(
    weight: Tensor,
    H: Tensor,
    grid: Grid,
    *,
    parameters: TileParameters | None = None,
    damp: float = 0.01,
    act_order: bool = True,
    mask: Tensor | None = None,
    factor: HessianFactor | None = None,
    sparsity: Sparsity | None = None,
) -> RoundingResult:
    """Round a weight so that the layer's output changes least. Does not modify its inputs.

    Rows are independent of each other: weights that share their inputs can be stacked.

    Args:
        weight: W (N, K), any float type.
        H: (K, K) float32, symmetric, positive semi-definite.
        parameters: of each tile; None: what the grid chooses.
        damp: lambda as a fraction of the mean of H's diagonal.
        act_order: columns in descending order of H_ii; groups keep the weight's column order.
        mask: bool (N, K); False: the weight is zero and stays zero.
        factor: of H, damped and ordered already; None: computed here.
        sparsity: how many weights become zero, chosen in the loop, those of the mask first; with N:M, K is a
            multiple of M and M columns are neighbours in the factor's order.

    Raises:
        NumericsError: W or H is not finite, or no damping up to 1 makes H invertible.
    """
    check_finite(weight)
    factor = factor or factorize(H, damp, act_order, sparsity.of or 1 if sparsity else 1)
    if parameters is None:
        parameters = grid.choose(weight, importance=factor.diagonal)
    rows, kept = grid.by_row(parameters, len(weight)), None if mask is None else mask[:, factor.order]
    parts = factor.columns(weight), factor.U, grid, rows, factor.group(grid.group_size)
    codes, kept = round_columns_(*parts, kept, sparsity=sparsity)
    return in_original_order(codes, factor, grid, parameters, kept)
