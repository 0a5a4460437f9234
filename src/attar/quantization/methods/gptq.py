"""GPTQ: Frantar, Ashkboos, Hoefler, Alistarh 2022, "GPTQ: Accurate Post-Training Quantization", arXiv
2210.17323, algorithm 1.

    H^-1 = (2 X^T X / T + lambda I)^-1 ,  U = Cholesky(H^-1)^T  (upper)
    for column i:   q_i = round(w_i) ;  e_i = (w_i - q_i) / U_ii ;  w_j -= e_i U_ij   for j > i

Letters: W (N, K) weight, N outputs, K inputs; H (K, K), U (K, K) from hessian.py. The loop over the columns
is in columns.py.

Differs from the paper: the parameters are chosen from the weight before any column is rounded, so that with
act-order (columns of the largest H_ii first, from the authors' code) the stored format keeps its column
order ("static" groups). Damping that is too small for a Cholesky is raised tenfold, and the result says so. A
column whose input is always zero (H_ii = 0) is "dead": its weight can do nothing and becomes 0. Weights that
share their inputs share H, U and the loop over the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attar.errors import NumericsError
from attar.quantization.columns import round_columns
from attar.quantization.grids import Grid, QuantizedTensor, TileParameters
from attar.quantization.hessian import all_finite, inverse_factor
from attar.quantization.rounded import RoundingResult

CHECK = "check the model and the calibration data"


def gptq(
    weight: Tensor,
    H: Tensor,
    grid: Grid,
    *,
    parameters: TileParameters | None = None,
    damp: float = 0.01,
    act_order: bool = True,
    mask: Tensor | None = None,
) -> RoundingResult:
    """Round a weight so that the layer's output changes least. Does not modify its inputs.

    Args:
        weight: W (N, K), any float type.
        H: (K, K) float32, symmetric, positive semi-definite.
        grid: the number format.
        parameters: of each tile; None: what the grid chooses.
        damp: lambda as a fraction of the mean of H's diagonal.
        act_order: columns in descending order of H_ii; groups keep the weight's column order.
        mask: bool (N, K); False: the weight is zero and stays zero.

    Raises:
        NumericsError: W or H is not finite, or no damping up to 1 makes H invertible.
    """
    return gptq_shared(
        [weight],
        H,
        grid,
        parameters=[parameters],
        damp=damp,
        act_order=act_order,
        masks=[mask],
    )[0]


@dataclass(frozen=True)
class HessianFactor:
    """What a Hessian is to the loop; weights with the same inputs share it.

    Attributes:
        order: int64 (K,), the order in which columns are rounded.
        U: (K, K), of H damped and in that order.
        damp: lambda that was used, as a fraction of H's mean diagonal.
        dead: bool (K,), columns without any input.
        diagonal: of H (K,), 1 where a column is dead.
    """

    order: Tensor
    U: Tensor
    damp: float
    dead: Tensor
    diagonal: Tensor


def factorize(H: Tensor, damp: float = 0.01, act_order: bool = True) -> HessianFactor:
    """The factor of a Hessian (K, K). Does not modify its input.

    Raises:
        NumericsError: H is not finite, or no damping up to 1 makes it invertible.
    """
    H = H.float()
    if not all_finite(H):
        raise NumericsError("the Hessian holds NaN or infinity", hint=CHECK)
    dead = H.diagonal() <= 0
    if dead.any():
        H = H.clone()
        H[dead, dead] = 1.0
    order = torch.arange(len(H), device=H.device)
    if act_order:
        order = torch.argsort(H.diagonal(), descending=True, stable=True)
    U, used = inverse_factor(H, damp, order)
    return HessianFactor(order, U, used, dead, H.diagonal())


def gptq_shared(
    weights: Sequence[Tensor],
    H: Tensor,
    grid: Grid,
    *,
    parameters: Sequence[TileParameters | None] | None = None,
    damp: float = 0.01,
    act_order: bool = True,
    masks: Sequence[Tensor | None] | None = None,
    inputs: HessianFactor | None = None,
) -> list[RoundingResult]:
    """:func:`gptq` of several weights with the same inputs, in one loop over the columns; ``inputs`` is what
    :func:`factorize` made of H."""
    W = torch.cat([weight.float() for weight in weights])  # a copy, also of a single one
    if len(weights) == 1:
        W = W.clone()
    if not all_finite(W):
        raise NumericsError("the weight holds NaN or infinity", hint=CHECK)
    inputs = inputs or factorize(H, damp, act_order)
    W[:, inputs.dead] = 0.0
    K, order = W.shape[1], inputs.order
    sizes = [len(weight) for weight in weights]
    chosen = [
        given or grid.choose(part, importance=inputs.diagonal)
        for given, part in zip(parameters or [None] * len(sizes), W.split(sizes), strict=True)
    ]
    group = order // (grid.group_size or K)
    rows = _stack([grid.by_row(one, size) for one, size in zip(chosen, sizes, strict=True)])
    mask = _stack_masks(masks, sizes, K, W.device)
    codes = round_columns(W[:, order], inputs.U, grid, rows, group, None if mask is None else mask[:, order])
    whole = torch.empty(codes.shape, dtype=grid.code_dtype, device=W.device)
    whole[:, order] = codes.to(grid.code_dtype)
    return [
        RoundingResult(QuantizedTensor(grid, part.contiguous(), one), inputs.damp, int(inputs.dead.sum()))
        for part, one in zip(whole.split(sizes), chosen, strict=True)
    ]


def _stack(rows: Sequence[TileParameters]) -> TileParameters:
    """Parameters of several weights, one under the other."""
    if len(rows) == 1:
        return rows[0]

    def joined(values: list[Tensor | None]) -> Tensor | None:
        return None if values[0] is None else torch.cat([value for value in values if value is not None])

    scale = torch.cat([one.scale for one in rows])
    return TileParameters(scale, joined([one.zero for one in rows]), joined([one.minimum for one in rows]))


def _stack_masks(
    masks: Sequence[Tensor | None] | None, sizes: Sequence[int], columns: int, device: torch.device
) -> Tensor | None:
    if masks is None or all(mask is None for mask in masks):
        return None
    full = [torch.ones(size, columns, dtype=torch.bool, device=device) for size in sizes]
    return torch.cat([one if mask is None else mask for mask, one in zip(masks, full, strict=True)])
