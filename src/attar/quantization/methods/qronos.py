"""Qronos: Zhang, Zhang, Colbert, Saab 2025, "Qronos: Correcting the Past by Shaping the Future... in
Post-Training Quantization", arXiv 2505.11695, algorithm 1 in the efficient form of its theorem.

The layer's inputs x come from layers that are quantized already; its output should be the original layer's on
the original inputs x~:  minimise  || W X~^T - W' X^T ||^2.  For column t, in turn:

    correct:   q_t = the code that makes the objective least, the columns after t held at w^(t-1)
    diffuse:   w^(t) = the least-squares solution of the columns after t, given q_1 .. q_t

From the second column on, w^(t-1) is a least-squares solution itself, so "correct" is rounding its column t
and "diffuse" is GPTQ's update. The first column is decided with the others at the original weight. Hence

    V = W + W (C - H) (H + lambda I)^-1                        the least-squares weight, nothing rounded
    q_1 = round( w_1 + [W (C - H)]_1 / (H_11 + lambda) )
    for i:  e_i = (v_i - q_i) / U_ii ;  v_j -= e_i U_ij  for j > i ;  q_{i+1} = round(v_{i+1})

Letters: W (N, K) weight, N outputs, K inputs; X, X~ (T, K) inputs, T tokens; H = 2 / T X^T X and C = 2 / T
X~^T X, both (K, K); U (K, K) upper with U^T U = (H + lambda I)^-1; V (N, K) what is still to be rounded.

Differs from the paper: damping pulls towards W, || W X~ - W' X ||^2 + lambda T / 2 || W - W' ||^2, and does
so in the first column too, so that X = X~ is GPTQ exactly; lambda is a fraction of H's mean diagonal and not
of its largest eigenvalue. Static groups, unseen columns and lazy updates as in GPTQ; the other columns
compensate what an unseen one contributed in the original model.
"""

from __future__ import annotations

from torch import Tensor

from attar.quantization.columns import RoundingResult, in_original_order, round_columns
from attar.quantization.grids import Grid, TileParameters
from attar.quantization.hessian import HessianFactor, check_finite, factorize


def qronos(
    weight: Tensor,
    H: Tensor,
    cross: Tensor,
    grid: Grid,
    *,
    parameters: TileParameters | None = None,
    damp: float = 0.01,
    act_order: bool = True,
    mask: Tensor | None = None,
    factor: HessianFactor | None = None,
) -> RoundingResult:
    """Round a weight so that the layer, after quantized layers, outputs most nearly what the original one
    does. Does not modify its inputs.

    Args:
        weight: W (N, K), any float type.
        H: (K, K) float32, symmetric, positive semi-definite.
        cross: C (K, K) float32, rows for the original inputs, columns for the quantized ones.
        parameters: of each tile; None: what the grid chooses for W.
        damp: lambda as a fraction of the mean of H's diagonal.
        act_order: columns in descending order of H_ii.
        mask: bool (N, K); False: the weight is zero and stays zero.
        factor: of H, damped and ordered already; None: computed here.

    Raises:
        NumericsError: W, H or C is not finite, or no damping up to 1 makes H invertible.
    """
    W = weight.float().clone()
    check_finite(W, H, cross)
    missing = W @ (cross.float() - H.float())
    factor = factor or factorize(H, damp, act_order)
    parameters = parameters or grid.choose(W, importance=factor.diagonal)
    order, U = factor.order, factor.U
    damped = factor.diagonal + factor.damp * factor.diagonal.mean()
    V = W[:, order] + missing[:, order] @ U.T @ U
    first = W[:, order[0]] + missing[:, order[0]] / damped[order[0]]
    rows = grid.by_row(parameters, len(W))
    kept = None if mask is None else mask[:, order]
    codes, _ = round_columns(V, U, grid, rows, factor.group(grid.group_size), kept, first)
    return in_original_order(codes, factor, grid, parameters)


def least_squares_weight(weight: Tensor, H: Tensor, cross: Tensor, damp: float = 0.01) -> Tensor:
    """V, float32 (N, K): the weight whose output after quantized layers is closest to the original layer's,
    as the target of another rounding. Does not modify its inputs.

    Raises:
        NumericsError: no damping up to 1 makes H invertible.
    """
    W = weight.float()
    factor = factorize(H, damp, act_order=False)
    missing = W @ (cross.float() - H.float())
    return W + missing @ factor.U.T @ factor.U
