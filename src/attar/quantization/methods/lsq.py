"""LSQ: Esser, McKinstry, Bablani, Appuswamy, Modha 2019, "Learned Step Size Quantization", arXiv 1902.08153,
eq. 1 to 5.

    v^ = s * round(clip(v / s, -Q_N, Q_P))
    dv^/ds := round(v/s) - v/s  inside,  -Q_N below,  Q_P above ;    dv^/dv := 1 inside, 0 outside
    the gradient of s is multiplied by g = 1 / sqrt(n Q_P) ;    s starts at 2 mean|v| / sqrt(Q_P)

Letters: v weights or activations; s step size; -Q_N, Q_P lowest and highest level; n number of weights that
share s, or of the features of the layer (activations).

Differs from the paper: s is rounded to its stored form before use, so that the trained model is exactly the
saved one. The levels are as in any grid without a minimum, with an s for each tile. A zero, where the
grid has one, is learned as in LSQ+ (Bhalgat et al. 2020, arXiv 2004.09576) and rounded to a code.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attar.errors import SettingsError
from attar.models.head import product_type
from attar.quantization.grids import Grid, IntGrid, TileParameters
from attar.quantization.grids.float8 import Float8Grid
from attar.quantization.grids.grid import stored_scale
from attar.quantization.grids.straight_through import limits, quantize_through, storable, through


class _ScaleGradient(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0] * ctx.factor, None


def scale_gradient(value: Tensor, factor: float) -> Tensor:
    """``value``, with its gradient multiplied by ``factor``."""
    passed: Tensor = _ScaleGradient.apply(value, factor)
    return passed


def quantize_weight(weight: Tensor, scale: Tensor, grid: Grid, zero: Tensor | None = None) -> Tensor:
    """v^ of a weight, float32 (N, K), with gradients to weight, scale and zero. Does not modify its inputs.

    Args:
        weight: v (N, K), float32.
        scale: s (P, G), not 0, before it is rounded to its stored form.
        grid: the number format; one without a minimum.
        zero: (P, G), before it is rounded to a code.
    """
    parameters = stored(scale, grid, (weight.shape[0], weight.shape[1]), zero)
    spread = parameters.map(lambda value: value[:, None, :, None])
    quantized = quantize_through(grid.tile(weight), grid, spread)
    return grid.untile(quantized, (weight.shape[0], weight.shape[1]))


class _Decode(torch.autograd.Function):  # type: ignore[misc]
    """v^ = s (level - z) of fixed codes, and ds = sum of dv^ (level - z) over a tile. The backward
    pass computes the levels again from the codes, and keeps nothing else."""

    @staticmethod
    def forward(
        ctx: Any, scale: Tensor, zero: Tensor | None, codes: Tensor, grid: Grid, kind: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(zero, codes)
        ctx.grid = grid
        values = _levels(codes, zero, grid) * scale[:, None, :, None]
        return grid.untile(values.to(grid.storage).to(kind), (codes.shape[0], codes.shape[1]))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        zero, codes = ctx.saved_tensors
        products = _levels(codes, zero, ctx.grid) * ctx.grid.tile(upstream[0])
        return products.sum((1, 3)), None, None, None, None


def _levels(codes: Tensor, zero: Tensor | None, grid: Grid) -> Tensor:
    """level - z of the codes (N, K), in tiles (P, r, G, c)."""
    levels = grid.level(grid.tile(codes))
    return levels if zero is None else levels - zero[:, None, :, None]


def decode_weight(codes: Tensor, scale: Tensor, grid: Grid, zero: Tensor | None = None) -> Tensor:
    """The weight of fixed codes (N, K), with a gradient to scale: float32, or in the type of autocast's
    products, in which it will be read.

    Args:
        codes: (N, K).
        scale: s (P, G), not 0, before it is rounded to its stored form.
        grid: the number format; one without a minimum.
        zero: (P, G), before it is rounded to a code; it does not learn.
    """
    parameters = stored(scale, grid, (codes.shape[0], codes.shape[1]), zero)
    weight: Tensor = _Decode.apply(parameters.scale, parameters.zero, codes, grid, product_type(scale))
    return weight


def stored(
    scale: Tensor, grid: Grid, shape: tuple[int, int], zero: Tensor | None = None, count: int | None = None
) -> TileParameters:
    """Parameters in stored form, with LSQ's gradients to ``scale`` and ``zero``.

    Args:
        scale: s (P, G), not 0.
        shape: (N, K) of the weight.
        zero: (P, G).
        count: n; None: the weights of a tile.

    Raises:
        SettingsError: the grid searches for its scales itself.
    """
    tile = (grid.rows or shape[0]) * (grid.group_size or shape[1])
    g = gradient_factor(tile if count is None else count, limits(grid)[1])
    hard = storable(grid, TileParameters(scale.detach()), scale, shape)
    if hard is None:
        raise SettingsError("scheme", type(grid).__name__, "a grid with free scales, where they are learned")
    rounded = None
    if zero is not None:
        assert isinstance(grid, IntGrid)
        rounded = through(scale_gradient(zero, g), zero.detach().round().clamp(grid.low, grid.high))
    return TileParameters(through(scale_gradient(scale, g), hard.scale), rounded, None, hard.stored)


def gradient_factor(count: int, highest: float) -> float:
    """g = 1 / sqrt(n Q_P)."""
    return 1.0 / math.sqrt(count * highest)


def quantize_activation(
    x: Tensor, scale: Tensor, grid: IntGrid | Float8Grid, zero: Tensor | None = None
) -> Tensor:
    """v^ of a layer's input (..., K), in its own type, with gradients to x, scale and zero. Does not modify
    x.

    Args:
        x: any float type; the arithmetic is float32.
        scale: s, one number, positive, before it is rounded to the grid's storage type.
        grid: the number format; its tiles are not used.
        zero: one number, before it is rounded to a code.
    """
    g = gradient_factor(x.shape[-1], limits(grid)[1])
    step = through(scale_gradient(scale, g), stored_scale(scale.detach(), grid.storage))
    rounded = None
    if zero is not None:
        low, high = limits(grid)
        rounded = through(scale_gradient(zero, g), zero.detach().round().clamp(low, high))
    plain = replace(grid, storage=torch.float32)
    return quantize_through(x.float(), plain, TileParameters(step, rounded)).to(x.dtype)
