"""GPTAQ: Li, Yin, Lee, Xiao, Panda 2025, "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric
Calibration", arXiv 2504.02692, algorithm 1.

The layer's inputs x come from layers that are quantized already; its output should be the original layer's on
the original inputs x~. GPTQ's update gets a second term, the part of column i's missing output w_i (x~_i -
x_i) that the columns after i can compensate:

    P = ( ((C - H) U^T) with its strict upper triangle only ) U
    for column i:   q_i = round(w_i) ;  e_i = (w_i - q_i) / U_ii
                    w_j += alpha w_i P_ij - e_i U_ij   for j > i

Letters: W (N, K) weight, N outputs, K inputs; X, X~ (T, K) inputs, T tokens; H = 2 / T X^T X and C = 2 / T
X~^T X, both (K, K); U (K, K) upper with U^T U = (H + lambda I)^-1; w_i column i with all updates so far.

The updates are linear, so no second sum is needed: with S = (I - alpha P)^-1, unit upper triangular, the loop
is GPTQ's on the weight W S with the factor diag(U) + (U - diag(U)) S.

Which residual: the paper's w_i is the compensated weight, that is, it aims at the output of the compensated
weight on X~. Li et al. 2026 ("Rethinking Residual Errors in Compensation-based LLM Quantization", ResComp,
arXiv 2604.07955) aim at the original weight's output: the residual of column i is then w0_i (x~_i - x_i) +
(w0_i - w_i) x_i, w0 the original weight. ``residual="original"`` takes the first of these terms, which makes
the loop GPTQ's on W (I + alpha P). The second is left out on purpose: after each GPTQ step, what is missing
from the original output is orthogonal to every column that is not rounded yet, so there is nothing to
compensate; column i's share alone would turn the update into (w0_i - q_i) U_ij / U_ii, which makes the
objective worse. What both leave out, the residuals of columns not reached yet, is in qronos.py, which is
exact.

Differs from the paper: alpha is 1 by default, where the authors' code has 0.25. Static groups, damping,
unseen columns and lazy updates as in GPTQ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.errors import SettingsError
from attar.quantization.columns import RoundingResult, in_original_order, round_columns
from attar.quantization.grids import Grid, TileParameters
from attar.quantization.hessian import HessianFactor, check_finite, factorize

RESIDUALS = ("compensated", "original")


def gptaq(
    weight: Tensor,
    H: Tensor,
    cross: Tensor,
    grid: Grid,
    *,
    parameters: TileParameters | None = None,
    damp: float = 0.01,
    act_order: bool = True,
    alpha: float = 1.0,
    residual: str = "compensated",
    mask: Tensor | None = None,
    factor: HessianFactor | None = None,
) -> RoundingResult:
    """Round a weight so that the layer, after quantized layers, outputs what the original one does. Does not
    modify its inputs.

    Args:
        weight: W (N, K), any float type.
        H: (K, K) float32, symmetric, positive semi-definite.
        cross: C (K, K) float32, rows for the original inputs, columns for the quantized ones.
        parameters: of each tile; None: what the grid chooses for W.
        damp: lambda as a fraction of the mean of H's diagonal.
        act_order: columns in descending order of H_ii.
        alpha: fraction of the residual that is compensated, 0 (GPTQ) to 1.
        residual: "compensated" (the paper) or "original" weights in the residual.
        mask: bool (N, K); False: the weight is zero and stays zero.
        factor: of H, damped and ordered already; None: computed here.

    Raises:
        SettingsError: no such residual.
        NumericsError: W, H or C is not finite, or no damping up to 1 makes H invertible.
    """
    if residual not in RESIDUALS:
        raise SettingsError("residual", residual, " or ".join(RESIDUALS))
    W = weight.float().clone()
    check_finite(W, H, cross)
    factor = factor or factorize(H, damp, act_order)
    parameters = parameters or grid.choose(W, importance=factor.diagonal)
    order, U = factor.order, factor.U
    change = cross.float() - H.float()
    P = alpha * (change[order][:, order] @ U.T).triu(1) @ U
    V, shifted_U = _shifted(W[:, order], U, P, residual)
    rows = grid.by_row(parameters, len(W))
    kept = None if mask is None else mask[:, order]
    codes, _ = round_columns(V, shifted_U, grid, rows, factor.group(grid.group_size), kept)
    return in_original_order(codes, factor, grid, parameters)


def _shifted(W: Tensor, U: Tensor, P: Tensor, residual: str) -> tuple[Tensor, Tensor]:
    """The weight and the factor with which GPTQ's loop is GPTAQ's."""
    if residual == "original":
        return W + W @ P, U
    unit = torch.eye(len(P), device=P.device) - P
    both = torch.cat([W, U.triu(1)])
    solved = torch.linalg.solve_triangular(unit, both, upper=True, left=False, unitriangular=True)
    return solved[: len(W)], solved[len(W) :] + U.diagonal().diag()
