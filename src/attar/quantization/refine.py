"""Refinement of codes that are there: coordinate descent on the codes, least squares for the scales, in turn.
Behdin, Acharya, Gupta, Keerthi, Mazumder 2023, "QuantEase", arXiv 2309.01885, algorithm 1 (the codes).

    minimise  f(W') = tr(W' H W'^T) - 2 tr(W' B^T)          B = W H,  or W C for the asymmetric methods
    codes:    w'_k <- round(w'_k - [W' H - B]_k / H_kk)      for each column k, the others held
    scales:   s <- argmin f(s * (level(q) - z))              each row, all its groups at once

Letters: W (N, K) weight; W' decoded codes; H (K, K), C (K, K) from hessian.py; B (N, K); q codes; s, z scale
and zero of a group; A (G, G) normal equations of a row, G groups.

GPTQ never comes back to a column; this does, and each step can only lower f. It starts from any rounding.

Differs from the paper: scales are refitted between the sweeps, rounded as they are stored, and kept only
where that lowers the row's f.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.quantization.grids import Parameters, Quantized

BLOCK = 128
BYTES = 2**28  # of normal equations at a time


def refine(
    quantized: Quantized,
    H: Tensor,
    target: Tensor,
    *,
    sweeps: int = 4,
    damp: float = 0.01,
    weight: Tensor | None = None,
    mask: Tensor | None = None,
) -> Quantized:
    """Better codes and scales for the same layer. Does not modify its inputs.

    Args:
        quantized: codes (N, K) to start from; its groups follow the column order.
        H: (K, K) float32, not damped.
        target: B (N, K) float32.
        sweeps: passes over the columns; the scales are refitted between two of them.
        damp: lambda as a fraction of H's mean diagonal, which holds W' near ``weight``.
        weight: W (N, K), what damping holds the codes to; None: B H^-1 is not known, so no damping.
        mask: bool (N, K); False: stays zero.
    """
    H, B = H.float().clone(), target.float()
    dead = H.diagonal() <= 0
    if weight is not None:
        ridge = damp * H.diagonal().mean()
        H.diagonal().add_(ridge)
        B = B + ridge * weight.float()
    H[dead, dead] = 1.0
    for sweep in range(sweeps):
        quantized = descend(quantized, H, B, mask)
        if sweep < sweeps - 1:
            quantized = refit(quantized, H, B)
    return quantized


def descend(quantized: Quantized, H: Tensor, B: Tensor, mask: Tensor | None = None) -> Quantized:
    """One pass of coordinate descent over the columns, in blocks, on transposed matrices."""
    grid, (N, K) = quantized.grid, quantized.codes.shape
    rows = grid.by_row(quantized.parameters, N)
    group = torch.arange(K, device=H.device) // (grid.group_size or K)
    codes = quantized.codes.float().T.contiguous()
    current = grid.decode(codes, rows.each(lambda value: value.T[group]))
    kept = None if mask is None else mask.T.contiguous()
    gradient = torch.addmm(B.T, H, current, beta=-1.0)  # (W' H - B)^T
    step = (1.0 / H.diagonal()).tolist()
    for start in range(0, K, BLOCK):
        end = min(start + BLOCK, K)
        spread = rows.each(lambda value, at=group[start:end]: value.T[at].contiguous())  # type: ignore[misc]
        inner = H[start:end, start:end].contiguous()
        moved = torch.zeros_like(gradient[start:end])
        for i in range(end - start):
            slope = gradient[start + i]
            if i:
                slope = torch.addmv(slope, moved[:i].T, inner[:i, i])
            at = spread.each(lambda value, i=i: value[i])  # type: ignore[misc]
            wanted = current[start + i] - slope * step[start + i]
            if kept is not None:
                wanted = wanted * kept[start + i]
            codes[start + i] = grid.encode(wanted, at)
            decoded = grid.decode(codes[start + i], at)
            torch.sub(decoded, current[start + i], out=moved[i])
            current[start + i] = decoded
        if end < K:
            gradient[end:].addmm_(H[end:, start:end], moved)
    return Quantized(grid, codes.T.to(grid.code_dtype).contiguous(), quantized.parameters)


def refit(quantized: Quantized, H: Tensor, B: Tensor) -> Quantized:
    """The same codes with the scales that fit them best; unchanged where a grid's scales are not free.

    The normal equations stand in memory for some rows at a time, at most :data:`BYTES` of them.
    """
    grid, old = quantized.grid, quantized.parameters.scale
    K = quantized.codes.shape[1]
    G = grid.groups(K)
    if grid.rows != 1 or K % G or grid.rescaled(quantized.parameters, old) is None:
        return quantized
    unit, offset = _unit_values(quantized)
    aim = B if offset is None else B + offset @ H
    rows = max(1, BYTES // (4 * G * G))
    parts = zip(unit.split(rows), aim.split(rows), strict=True)
    scale = torch.cat([_least_squares(part, target, H, G) for part, target in parts])
    scale = torch.where(torch.isfinite(scale) & (scale > 0.1 * old) & (scale < 10.0 * old), scale, old)
    parameters = grid.rescaled(quantized.parameters, scale)
    assert parameters is not None
    better = _cost(Quantized(grid, quantized.codes, parameters), H, B) < _cost(quantized, H, B)
    kept = torch.where(better[:, None], parameters.scale, old)
    return Quantized(
        grid, quantized.codes, Parameters(kept, quantized.parameters.zero, quantized.parameters.minimum)
    )


def _least_squares(unit: Tensor, target: Tensor, H: Tensor, G: int) -> Tensor:
    """The scales (n, G) of some rows that solve A s = pull: one system for each row.

    Args:
        unit: (n, K), values of the codes at scale 1.
        target: (n, K), what the row's output should be.
    """
    n, width = len(unit), unit.shape[1] // G
    pull = (target * unit).reshape(n, G, -1).sum(-1)
    A = torch.empty(n, G, G, dtype=torch.float32, device=H.device)
    for g in range(G):
        columns = slice(g * width, (g + 1) * width)
        A[:, :, g] = ((unit[:, columns] @ H[columns]) * unit).reshape(n, G, width).sum(-1)
    ridge = 1e-6 * A.diagonal(dim1=1, dim2=2).mean(-1, keepdim=True) + 1e-12
    A.diagonal(dim1=1, dim2=2).add_(ridge)
    return torch.linalg.solve(A, pull)


def _unit_values(quantized: Quantized) -> tuple[Tensor, Tensor | None]:
    """level(q) - z (N, K), and the minimum m spread over the columns (N, K), None where there is none."""
    grid, parameters = quantized.grid, quantized.parameters
    one = Parameters(torch.ones_like(parameters.scale), parameters.zero)
    spread = one.each(lambda value: value[:, None, :, None])
    shape = (quantized.codes.shape[0], quantized.codes.shape[1])
    unit = grid.untile(grid.decode(grid.tile(quantized.codes), spread), shape)
    if parameters.minimum is None:
        return unit, None
    return unit, parameters.minimum.repeat_interleave(shape[1] // grid.groups(shape[1]), 1)


def _cost(quantized: Quantized, H: Tensor, B: Tensor) -> Tensor:
    """f of each row (N,), without the storage rounding of single values."""
    grid = quantized.grid
    spread = quantized.parameters.each(lambda value: value[:, None, :, None])
    shape = (quantized.codes.shape[0], quantized.codes.shape[1])
    W = grid.untile(grid.decode(grid.tile(quantized.codes), spread), shape)
    return ((W @ H - 2.0 * B) * W).sum(-1)


def output_cost(quantized: Quantized, H: Tensor, B: Tensor) -> float:
    """f, summed over the rows: the layer's squared output error less a constant."""
    return float(_cost(quantized, H.float(), B.float()).double().sum())
