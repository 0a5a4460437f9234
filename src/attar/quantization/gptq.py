"""GPTQ: Frantar, Ashkboos, Hoefler, Alistarh 2022, "GPTQ: Accurate Post-Training Quantization", arXiv
2210.17323, algorithm 1.

    H^-1 = (2 X^T X / T + lambda I)^-1 ,  U = Cholesky(H^-1)^T  (upper)
    for column i:   q_i = round(w_i) ;  e_i = (w_i - q_i) / U_ii ;  w_j -= e_i U_ij   for j > i

Letters: W (N, K) weight, N outputs, K inputs; H (K, K) from hessian.py; E (N, B) errors of a block of B
columns; U (K, K).

Differs from the paper: the scales are chosen from the weight before any column is rounded ("static groups"),
so that with ``act_order`` (columns of the largest H_ii first, from the authors' code) the stored format keeps
its column order. Damping that is too small for a Cholesky is raised tenfold, and the result says so. A column
whose input is always zero (H_ii = 0) is "dead": its weight can do nothing and becomes 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attar.errors import NumericsError
from attar.quantization.grids import Grid, Parameters, Quantized

BLOCK = 128  # B: columns whose updates are applied to the rest in one matrix product


@dataclass(frozen=True)
class Rounded:
    """What GPTQ returns.

    Attributes:
        quantized: the codes.
        damp: lambda that was used, as a fraction of the mean diagonal.
        dead: how many columns had no input.
    """

    quantized: Quantized
    damp: float
    dead: int


def gptq(weight: Tensor, H: Tensor, grid: Grid, *, damp: float = 0.01, act_order: bool = True) -> Rounded:
    """Round a weight so that the layer's output changes least. Does not modify its inputs.

    Args:
        weight: W (N, K), any float type; g divides K.
        H: (K, K) float32, symmetric, positive semi-definite.
        grid: the number format.
        damp: lambda as a fraction of the mean of H's diagonal.
        act_order: columns in descending order of H_ii.

    Raises:
        NumericsError: H is not finite, or no damping up to 1 makes it invertible.
    """
    W = weight.float().clone()
    H = H.float().clone()
    if not (torch.isfinite(H).all() and torch.isfinite(W).all()):
        raise NumericsError(
            "the weight or its Hessian holds NaN or infinity", hint="check the model and the calibration data"
        )
    dead = H.diagonal() <= 0
    W[:, dead] = 0.0
    H[dead, dead] = 1.0
    parameters = grid.choose(W)
    order = torch.arange(W.shape[1], device=W.device)
    if act_order:
        order = torch.argsort(H.diagonal(), descending=True, stable=True)
    group = order // (grid.group_size or W.shape[1])
    U, used = inverse_factor(H[order][:, order], damp)
    codes = _round_columns(W[:, order], U, grid, parameters, group)
    original = torch.empty_like(codes, dtype=torch.int8)
    original[:, order] = codes.to(torch.int8)
    return Rounded(Quantized(grid, original, parameters), used, int(dead.sum()))


def inverse_factor(H: Tensor, damp: float) -> tuple[Tensor, float]:
    """U, upper triangular with U^T U = (H + lambda I)^-1, and the damping that was needed.

    Raises:
        NumericsError: not even a damping of 1 is enough.
    """
    mean = H.diagonal().mean()
    used = damp
    while True:
        damped = H.clone()
        damped.diagonal().add_(used * mean)
        L, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            U, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(L), upper=True)
            if not failed and torch.isfinite(U).all():
                return U, used
        if used >= 1.0:
            raise NumericsError(
                "the Hessian stays singular with a damping of 1",
                hint="more calibration samples, or --method rtn",
            )
        used = max(used * 10.0, 1e-4)


def _round_columns(W: Tensor, U: Tensor, grid: Grid, parameters: Parameters, group: Tensor) -> Tensor:
    """Codes (N, K) of the columns in the order they stand in; W is consumed.

    The inner loop works on transposed blocks (columns become contiguous rows), which halves its time.
    """
    columns = W.shape[1]
    Wt = W.T.contiguous()
    codes = torch.empty_like(Wt)
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        block, factor = Wt[start:end], U[start:end, start:end]
        scale, zero = _per_column(parameters, group[start:end])
        errors = torch.empty_like(block)
        for i in range(end - start):
            column = Parameters(scale[i], None if zero is None else zero[i])
            codes[start + i] = grid.encode(block[i], column)
            errors[i] = (block[i] - grid.decode(codes[start + i], column)) / factor[i, i]
            block[i + 1 :].addr_(factor[i, i + 1 :], errors[i], alpha=-1.0)
        Wt[end:].addmm_(U[start:end, end:].T, errors, alpha=-1.0)
    return codes.T


def _per_column(parameters: Parameters, group: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scale and zero of each column, contiguous (B, N)."""
    scale = parameters.scale.T[group].contiguous()
    return scale, None if parameters.zero is None else parameters.zero.T[group].contiguous()
