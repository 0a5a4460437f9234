"""Refinement of given codes: coordinate descent on the codes alternates with least squares for the scales.
Behdin, Acharya, Gupta, Keerthi, Mazumder 2023, "QuantEase", arXiv 2309.01885, algorithm 1 (the codes).

    minimise  f(W') = tr(W' H W'^T) - 2 tr(W' B^T)          B = W H,  or W C for the asymmetric methods
    codes:    w'_k <- round(w'_k - [W' H - B]_k / H_kk)      for each column k, the others fixed
    scales:   A ds = -[<g, u>]_groups ;  s <- s + ds         each row, all its groups at once
    gradient: g = W' H - B ;  g <- g + (change of W') H      f changes by <g_before + g_after, change of W'>

Letters: W (N, K) weight; W' decoded codes; H (K, K), C (K, K) from hessian.py; B (N, K); q codes; s, z scale
and zero of a group, u = level(q) - z; g (N, K) half the gradient of f; A (G, G) normal equations of a row, G
groups.

GPTQ visits a column once. Here columns are visited again, and no step raises f. Any rounding can be the
start.

Differs from the paper: scales are refitted between the sweeps, rounded as they are stored, and kept only
where that lowers the row's f. The gradient is updated, not recomputed: a step costs one product with H.
Inside a block of columns the loop is compiled (kernels/columns.py) for grids with a code book.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attar.kernels import columns as kernel
from attar.quantization.columns import compiled_tiles
from attar.quantization.grids import Grid, QuantizedTensor, TileParameters
from attar.quantization.hessian import damped

BLOCK = 128
BYTES = 2**28  # of normal equations in memory at once
WEIGHTS = 1 << 25  # refined at a time: a descent has eight tensors of their size


@dataclass
class Descent:
    """State of the descent. All tensors but the parameters are transposed, so that a column is contiguous.

    Attributes:
        parameters: (P, G), as the grid chose them.
        codes: q (K, N), float32.
        current: W' (K, N).
        gradient: g (K, N).
        H: (K, K), damped.
        mask: bool (K, N); False: stays zero.
    """

    grid: Grid
    parameters: TileParameters
    codes: Tensor
    current: Tensor
    gradient: Tensor
    H: Tensor
    mask: Tensor | None = None

    @property
    def group(self) -> Tensor:
        """The tile of each column, int64 (K,)."""
        return torch.arange(len(self.codes), device=self.codes.device) // self.width

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return self.grid.group_size or len(self.codes)

    def rows(self) -> TileParameters:
        """(N, G), a row of parameters for each output."""
        return self.grid.by_row(self.parameters, self.codes.shape[1])

    def quantized(self) -> QuantizedTensor:
        """The current codes and parameters."""
        return QuantizedTensor(self.grid, self.codes.T.to(self.grid.code_dtype).contiguous(), self.parameters)


def refine(
    quantized: QuantizedTensor,
    H: Tensor,
    target: Tensor | None = None,
    *,
    sweeps: int = 4,
    damp: float = 0.01,
    weight: Tensor | None = None,
    mask: Tensor | None = None,
) -> QuantizedTensor:
    """Better codes and scales for the same layer. Does not modify its inputs, but that H's diagonal is
    damped meanwhile.

    Args:
        quantized: codes (N, K) to start from; its groups follow the column order.
        H: (K, K) float32, not damped.
        target: B (N, K) float32; None: W H.
        sweeps: passes over the columns; the scales are refitted between two of them.
        damp: lambda as a fraction of H's mean diagonal, which keeps W' near ``weight``.
        weight: W (N, K), which damping keeps the codes near to; None: no damping.
        mask: bool (N, K); False: stays zero.
    """
    H, unseen = H.float(), H.diagonal() <= 0
    ridge = damp * H.diagonal().mean() if weight is not None else 0.0
    codes, scales = [], []
    with damped(H, ridge) as A:
        pull = A.diagonal().where(unseen, torch.as_tensor(ridge))  # towards W
        for rows in _parts(quantized):
            of = [None if tensor is None else tensor[rows] for tensor in (target, weight, mask)]
            if of[0] is not None and of[1] is not None:
                of[0] = of[0].float() + pull * of[1].float()
            descent = start(_rows(quantized, rows), H, *of)
            for sweep in range(sweeps):
                last = sweep == sweeps - 1
                sweep_columns(descent, last)
                if not last:
                    refit_scales(descent)
            codes.append(descent.quantized().codes)
            scales.append(descent.parameters.scale)
    parameters = replace(quantized.parameters, scale=torch.cat(scales))
    return QuantizedTensor(quantized.grid, torch.cat(codes), parameters)


def _parts(quantized: QuantizedTensor) -> list[slice]:
    """Rows that are refined together: all, where they share scales, else some :data:`WEIGHTS`."""
    N, K = quantized.codes.shape
    step = max(1, WEIGHTS // K) if quantized.grid.rows == 1 else N
    return [slice(at, at + step) for at in range(0, N, step)]


def _rows(quantized: QuantizedTensor, rows: slice) -> QuantizedTensor:
    """Some rows of it; with all that decodes them, where it is all rows."""
    if rows.stop >= len(quantized.codes) and not rows.start:
        return quantized
    parameters = quantized.parameters.map(lambda value: value[rows])
    return QuantizedTensor(quantized.grid, quantized.codes[rows], parameters)


def start(
    quantized: QuantizedTensor,
    H: Tensor,
    target: Tensor | None = None,
    weight: Tensor | None = None,
    mask: Tensor | None = None,
) -> Descent:
    """The initial state; its gradient is W' H - B, or (W' - W) H without a target.

    Args:
        H: (K, K) damped.
    """
    N, K = quantized.codes.shape
    rows = quantized.grid.by_row(quantized.parameters, N)
    group = torch.arange(K, device=H.device) // (quantized.grid.group_size or K)
    codes = quantized.codes.float().T.contiguous()
    current = quantized.grid.decode(codes, rows.map(lambda value: value.T[group]))
    if target is not None:
        gradient = torch.addmm(target.float().T, H, current, beta=-1.0)
    else:
        assert weight is not None, "a target or the weight"
        gradient = H @ (current - weight.float().T)
    kept = None if mask is None else mask.T.contiguous()
    return Descent(quantized.grid, quantized.parameters, codes, current, gradient, H, kept)


def sweep_columns(descent: Descent, last: bool = False) -> None:
    """One pass of coordinate descent over the columns, in blocks; in place.

    Args:
        last: the final pass; the gradient of columns that it has visited is not updated.
    """
    H, gradient, K = descent.H, descent.gradient, len(descent.codes)
    tiles = compiled_tiles(descent.grid, descent.rows(), descent.group)
    for begin in range(0, K, BLOCK):
        at = slice(begin, min(begin + BLOCK, K))
        moved = torch.empty_like(gradient[at])
        inner, kept = H[at, at].contiguous(), None if descent.mask is None else descent.mask[at]
        parts = gradient[at], inner, descent.current[at], descent.codes[at], moved
        if tiles is not None:
            kernel.descend_block(tiles, at, *parts, mask=kept)
        else:
            _descend_in_torch(descent, at, *parts, kept)
        reached = slice(at.stop, K) if last else slice(0, K)
        gradient[reached].addmm_(H[reached, at], moved)


def _descend_in_torch(
    descent: Descent,
    at: slice,
    gradient: Tensor,
    inner: Tensor,
    current: Tensor,
    codes: Tensor,
    moved: Tensor,
    mask: Tensor | None,
) -> None:
    """The same as :func:`attar.kernels.columns.descend_block`, for any grid and device."""
    grid, group = descent.grid, descent.group[at]
    spread = descent.rows().map(lambda value: value.T[group].contiguous())
    for i, step in enumerate(inner.diagonal().reciprocal()):
        slope = gradient[i]
        if i:
            slope = torch.addmv(slope, moved[:i].T, inner[:i, i])
        tile = spread.map(lambda value, i=i: value[i])  # type: ignore[misc]
        wanted = current[i] - slope * step
        if mask is not None:
            wanted = wanted.where(mask[i], 0.0)
        codes[i] = grid.encode(wanted, tile)
        decoded = grid.decode(codes[i], tile)
        torch.sub(decoded, current[i], out=moved[i])
        current[i] = decoded


def refit_scales(descent: Descent, output: Tensor | None = None) -> None:
    """Fit the scales to the codes by least squares, in place; no change where the grid's are not free.

    Rows are solved in chunks, whose normal equations need at most :data:`BYTES`.

    Args:
        output: H_O (N, N) of refine_kronecker.py, which ties the rows: each is fitted as if the others
            stayed, and all new scales are kept, or none; None: rows do not depend on each other.
    """
    grid, old, K = descent.grid, descent.parameters.scale, len(descent.codes)
    G = grid.groups(K)
    if grid.rows != 1 or K % G or grid.rescaled(descent.parameters, old) is None:
        return
    unit = _unit_values(descent)
    rows = max(1, BYTES // (4 * G * G))
    slope = descent.gradient if output is None else descent.gradient / output.diagonal()
    parts = zip(unit.split(rows), slope.T.split(rows), strict=True)
    scale = old + torch.cat([_least_squares(part, gradient, descent.H, G) for part, gradient in parts])
    ratio = scale / old
    scale = torch.where(torch.isfinite(ratio) & (ratio > 0.1) & (ratio < 10.0), scale, old)
    parameters = grid.rescaled(descent.parameters, scale)
    assert parameters is not None
    change = (parameters.scale - old).repeat_interleave(K // G, 1).mul_(unit).T.contiguous()
    after = torch.addmm(descent.gradient, descent.H, change if output is None else change @ output)
    rise = (change * (descent.gradient + after)).sum(0)
    better = (rise if output is None else rise.sum().expand_as(rise)) < 0
    kept = torch.where(better[:, None], parameters.scale, old)
    descent.parameters = TileParameters(kept, descent.parameters.zero, descent.parameters.minimum)
    descent.current.add_(change.mul_(better))
    descent.gradient = torch.where(better, after, descent.gradient)


def _least_squares(unit: Tensor, gradient: Tensor, H: Tensor, G: int) -> Tensor:
    """ds (n, G) of n rows, from A ds = -[<g, u>]_groups: one system for each row.

    Args:
        unit: u (n, K).
        gradient: g (n, K).
    """
    n, width = len(unit), unit.shape[1] // G
    pull = (gradient * unit).reshape(n, G, -1).sum(-1)
    A = torch.empty(n, G, G, dtype=torch.float32, device=H.device)
    for g in range(G):
        columns = slice(g * width, (g + 1) * width)
        from_group = slice(g * width, None)  # the rest of A by symmetry
        products = (
            ((unit[:, columns] @ H[columns, from_group]) * unit[:, from_group])
            .reshape(n, G - g, width)
            .sum(-1)
        )
        A[:, g:, g] = A[:, g, g:] = products
    ridge = 1e-6 * A.diagonal(dim1=1, dim2=2).mean(-1, keepdim=True) + 1e-12
    A.diagonal(dim1=1, dim2=2).add_(ridge)
    return torch.linalg.solve(A, pull).neg_()


def _unit_values(descent: Descent) -> Tensor:
    """u (N, K), contiguous."""
    grid = descent.grid
    zero = None if descent.parameters.zero is None else descent.rows().zero
    at = TileParameters(
        torch.ones(1, device=descent.codes.device), None if zero is None else zero.T[descent.group]
    )
    return grid.decode(descent.codes, at).T.contiguous()
