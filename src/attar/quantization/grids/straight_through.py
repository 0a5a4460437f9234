"""Quantization with gradients: encode and decode of any grid with the straight-through estimator of
Bengio, Léonard, Courville 2013, arXiv 1308.3432, and the scale's gradient of Esser et al. 2019, arXiv
1902.08153, eq. 3.

    u = (w + m) / s + z ,  v = u + d ,  w' = s * (level(nearest(v)) - z) - m
    d level(nearest(v)) / dv := inside = [lowest level <= v <= highest level]
    dw'/dw = inside ,  dw'/dd = s * inside ,  dw'/ds = level - z - inside * (u - z) ,
    dw'/dz = s * (inside - 1) ,  dw'/dm = inside - 1

Letters: w values; d an offset in units of codes; s, z, m scale, zero and minimum as in grid.py. AutoRound
learns d and s, quantization-aware training w, s and z.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attar.quantization.grids.grid import Grid, TileParameters

FAR = 1e30  # beyond every level


class _Through(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, soft: Tensor, hard: Tensor) -> Tensor:
        return hard.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0], None


def through(soft: Tensor, hard: Tensor) -> Tensor:
    """The values of ``hard``, bit for bit, with the gradient of ``soft``; both of one shape."""
    passed: Tensor = _Through.apply(soft, hard)
    return passed


class _Quantize(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        offset: Tensor | None,
        scale: Tensor,
        zero: Tensor | None,
        minimum: Tensor | None,
        grid: Grid,
    ) -> Tensor:
        parameters = TileParameters(scale, zero, minimum)
        u = on_unit_scale(values, parameters)
        v = u if offset is None else u + offset
        codes = grid.nearest(v)
        lowest, highest = limits(grid)
        inside = (v >= lowest) & (v <= highest)
        slope = grid.level(codes)  # dw'/ds
        slope = torch.where(inside, slope - u, slope if zero is None else slope - zero)
        ctx.save_for_backward(inside, slope, scale)
        ctx.shapes = tuple(None if part is None else part.shape for part in (offset, zero, minimum))
        return grid.decode(codes, parameters).to(grid.storage).float()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        inside, slope, scale = ctx.saved_tensors
        offset, zero, minimum = ctx.shapes
        gradient = upstream[0]
        passed = gradient * inside
        lost = passed - gradient if zero is not None or minimum is not None else None  # g * (inside - 1)
        return (
            passed,
            None if offset is None else (passed * scale).sum_to_size(offset),
            (gradient * slope).sum_to_size(scale.shape),
            None if zero is None or lost is None else (lost * scale).sum_to_size(zero),
            None if minimum is None or lost is None else lost.sum_to_size(minimum),
            None,
        )


def quantize_through(
    values: Tensor, grid: Grid, parameters: TileParameters, offset: Tensor | None = None
) -> Tensor:
    """The decoded nearest codes, float32, with the gradients above. Does not modify its inputs.

    Args:
        values: w, float32, of any shape.
        parameters: s, z, m; they broadcast against the values.
        offset: d, of the shape of the values.
    """
    result: Tensor = _Quantize.apply(
        values, offset, parameters.scale, parameters.zero, parameters.minimum, grid
    )
    return result


def on_unit_scale(values: Tensor, parameters: TileParameters) -> Tensor:
    """u, the values that the grid's ``nearest`` takes; the parameters broadcast."""
    if parameters.minimum is not None:
        values = values + parameters.minimum
    scale = parameters.scale
    scaled = values / torch.where(scale == 0, 1.0, scale)  # some formats store a scale of 0
    return scaled if parameters.zero is None else scaled + parameters.zero


def limits(grid: Grid) -> tuple[float, float]:
    """The lowest and the highest level."""
    ends = grid.level(grid.nearest(torch.tensor([-FAR, FAR])))
    return float(ends[0]), float(ends[1])


def levels(grid: Grid, device: torch.device | None = None) -> Tensor:
    """All levels of a grid in ascending order, float32 (L,), found by rounding a dense set of values."""
    fine = torch.exp2(torch.arange(-24 * 512, 18 * 512) / 512)
    even = torch.linspace(-256.0, 256.0, 4097)
    probes = torch.cat([-fine, fine, even, torch.tensor([-FAR, FAR])])
    return grid.level(grid.nearest(probes)).unique().to(device)


def spacing(grid: Grid, values: Tensor) -> Tensor | None:
    """The distance between the two levels around each value on the unit scale; None: 1 everywhere."""
    table = levels(grid, values.device)
    gaps = table.diff()
    if bool((gaps == 1.0).all()):
        return None
    return gaps[torch.searchsorted(table, values.contiguous()).sub_(1).clamp_(0, len(gaps) - 1)]


def into_cells(grid: Grid, values: Tensor, codes: Tensor, margin: float) -> Tensor:
    """The points nearest to ``values`` that round to ``codes``, on the unit scale.

    Args:
        values: on the unit scale, float32, any shape.
        codes: of the same shape.
        margin: distance of a moved point from its cell's edge, as a fraction of the gap between levels.
    """
    table = levels(grid, values.device)
    index = torch.searchsorted(table, grid.level(codes).contiguous())
    far = torch.full((1,), FAR, device=values.device)
    low = torch.cat([-far, table[:-1] + table.diff() * (0.5 + margin)])
    high = torch.cat([table[1:] - table.diff() * (0.5 + margin), far])
    moved = torch.minimum(torch.maximum(values, low[index]), high[index])
    return torch.where(grid.nearest(values) == codes, values, moved)


def storable(
    grid: Grid, base: TileParameters, scale: Tensor, shape: tuple[int, int]
) -> TileParameters | None:
    """The storable parameters nearest to a scale, without gradient; None where the grid searches its own.

    With two levels of scales, or powers of two: the grid's choice for tiles of constant magnitude.

    Args:
        base: parameters of the grid; their zero stays.
        scale: float32 (P, G).
        shape: (N, K) of the weight.
    """
    with torch.no_grad():
        scale = scale.detach()
        rescaled = grid.rescaled(base, scale)
        if rescaled is not None or grid.searches or base.zero is not None or base.minimum is not None:
            return rescaled
        constant = torch.full((grid.rows or 1, grid.group_size or 1), grid.magnitude, device=scale.device)
        unit = grid.choose(constant, 1.0).scale / grid.magnitude
        tall, wide = grid.rows or shape[0], grid.group_size or shape[1]
        even = (scale / unit.flatten()[0])[:, None, :, None].expand(-1, tall, -1, wide)
        return grid.choose(grid.untile(even, shape), 1.0)
