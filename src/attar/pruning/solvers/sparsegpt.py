"""SparseGPT: Frantar & Alistarh 2023, "SparseGPT: Massive Language Models Can Be Accurately Pruned in
One-Shot", arXiv 2301.00774, algorithm 1.

    U = Cholesky((H + lambda I)^-1)^T   (upper)
    for each block of B columns (N:M: of M):   zero the weights of the smallest w_i^2 / U_ii^2
    for column i:   e_i = w_i / U_ii where w_i becomes zero, else 0 ;  w_j -= e_i U_ij   for j > i

Letters: W (N, K) weight, N outputs, K inputs; H (K, K), U (K, K) from quantization's hessian.py; B = 128. The
loop is GPTQ's (quantization/columns.py), on the grid of real numbers.

Differs from the paper: exactly the asked fraction of a block becomes zero (the authors' code takes one weight
more). Damping that is too small for a Cholesky is raised tenfold. Columns may go in descending order of H_ii,
for N:M whole groups of M columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.quantization.columns import round_columns_
from attar.quantization.grids.real import RealGrid
from attar.quantization.hessian import HessianFactor, check_finite, factorize
from attar.sparsity import Sparsity

GRID = RealGrid()


def sparsegpt(
    weight: Tensor,
    H: Tensor,
    sparsity: Sparsity,
    *,
    damp: float = 0.01,
    act_order: bool = False,
    factor: HessianFactor | None = None,
) -> Tensor:
    """The pruned weight, float32 (N, K). Does not modify its inputs.

    Args:
        weight: W (N, K), any float type.
        H: (K, K) float32, symmetric, positive semi-definite.
        damp: lambda as a fraction of the mean of H's diagonal.
        act_order: columns of the largest H_ii first.
        factor: of H, damped and ordered already, which Linears with the same inputs share; None: computed
            here.

    Raises:
        SettingsError: K is no multiple of M.
        NumericsError: W or H is not finite, or no damping up to 1 makes H invertible.
    """
    sparsity.check(weight.shape[1], "a layer")
    check_finite(weight)
    factor = factor or factorize(H, damp, act_order, together=sparsity.of or 1)
    parts = factor.columns(weight), factor.U, GRID, GRID.choose(weight), factor.group(0)
    codes, _ = round_columns_(*parts, sparsity=sparsity)
    pruned = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    pruned[:, factor.order] = codes
    return pruned
