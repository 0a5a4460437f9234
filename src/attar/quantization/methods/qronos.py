"""Qronos: Zhang, Zhang, Colbert, Saab 2025, "Qronos: Correcting the Past by Shaping the Future... in
Post-Training Quantization", arXiv 2505.11695, algorithm 1 in the efficient form of its theorem.

The layer gets inputs x from layers that are quantized already, and should answer as the original layer does
on the original inputs x~:  minimise  || W X~^T - W' X^T ||^2.  For column t, in turn:

    correct:   q_t = the code that makes the objective least, the columns after t held at w^(t-1)
    diffuse:   w^(t) = the least-squares answer of the columns after t, given q_1 .. q_t

From the second column on, w^(t-1) is a least-squares answer itself, so "correct" is rounding its column t and
"diffuse" is GPTQ's update. The first column is decided with the others at the original weight. Hence

    V = W + W (C - H) (H + lambda I)^-1                        the least-squares weight, nothing rounded
    q_1 = round( w_1 + [W (C - H)]_1 / (H_11 + lambda) )
    for i:  e_i = (v_i - q_i) / U_ii ;  v_j -= e_i U_ij  for j > i ;  q_{i+1} = round(v_{i+1})

Letters: W (N, K) weight, N outputs, K inputs; X, X~ (T, K) inputs, T tokens; H = 2 / T X^T X and C = 2 / T
X~^T X, both (K, K); U (K, K) upper with U^T U = (H + lambda I)^-1; V (N, K) what is still to be rounded.

Differs from the paper: damping pulls towards W, || W X~ - W' X ||^2 + lambda T / 2 || W - W' ||^2, and does
so in the first column too, so that X = X~ is GPTQ exactly; lambda is a fraction of H's mean diagonal and not
of its largest eigenvalue. Static groups, dead columns and lazy updates as in GPTQ; a dead column becomes 0,
and what it carried in the original model is taken over by the other columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.errors import NumericsError
from attar.quantization.columns import round_columns
from attar.quantization.grids import Grid, QuantizedTensor, TileParameters
from attar.quantization.hessian import inverse_factor
from attar.quantization.rounded import RoundingResult


def qronos(
    weight: Tensor,
    H: Tensor,
    cross: Tensor,
    grid: Grid,
    *,
    parameters: TileParameters | None = None,
    damp: float = 0.01,
    act_order: bool = True,
    alpha: float = 1.0,
    mask: Tensor | None = None,
) -> RoundingResult:
    """Round a weight so that the layer, behind quantized layers, answers most like the original one. Does not
    modify its inputs.

    Args:
        weight: W (N, K), any float type.
        H: (K, K) float32, symmetric, positive semi-definite.
        cross: C (K, K) float32, rows for the original inputs, columns for the quantized ones.
        grid: the number format.
        parameters: of each tile; None: what the grid chooses for W.
        damp: lambda as a fraction of the mean of H's diagonal.
        act_order: columns in descending order of H_ii.
        alpha: how much of the difference C - H is corrected, 0 (GPTQ) to 1 (the paper).
        mask: bool (N, K); False: the weight is zero and stays zero.

    Raises:
        NumericsError: W, H or C is not finite, or no damping up to 1 makes H invertible.
    """
    W, H = weight.float().clone(), H.float().clone()
    if not all(torch.isfinite(value).all() for value in (W, H, cross)):
        raise NumericsError(
            "the weight or its Hessian holds NaN or infinity", hint="check the model and the calibration data"
        )
    missing = alpha * (W @ (cross.float() - H))
    dead = H.diagonal() <= 0
    W[:, dead] = 0.0
    H[dead, dead] = 1.0
    parameters = parameters or grid.choose(W, importance=H.diagonal())
    order = torch.arange(W.shape[1], device=W.device)
    if act_order:
        order = torch.argsort(H.diagonal(), descending=True, stable=True)
    group = order // (grid.group_size or W.shape[1])
    U, used = inverse_factor(H, damp, order)
    damped = H.diagonal() + used * H.diagonal().mean()
    V = W[:, order] + missing[:, order] @ U.T @ U
    first = W[:, order[0]] + missing[:, order[0]] / damped[order[0]]
    rows = grid.by_row(parameters, W.shape[0])
    kept = None if mask is None else mask[:, order]
    codes = torch.empty_like(W, dtype=grid.code_dtype)
    codes[:, order] = round_columns(V, U, grid, rows, group, kept, first).to(grid.code_dtype)
    return RoundingResult(QuantizedTensor(grid, codes, parameters), used, int(dead.sum()))


def least_squares_weight(weight: Tensor, H: Tensor, cross: Tensor, damp: float = 0.01) -> Tensor:
    """V, float32 (N, K): the weight that answers on the quantized prefix' inputs most like W does on the
    original ones, for a rounding that takes a target. Does not modify its inputs.

    Raises:
        NumericsError: no damping up to 1 makes H invertible.
    """
    W, H = weight.float(), H.float().clone()
    missing = W @ (cross.float() - H)
    dead = H.diagonal() <= 0
    H[dead, dead] = 1.0
    U, _ = inverse_factor(H, damp)
    return W.masked_fill(dead, 0.0) + missing @ U.T @ U
