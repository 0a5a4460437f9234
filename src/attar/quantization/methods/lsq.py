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


def decode_weight(codes: Tensor, scale: Tensor, grid: Grid, zero: Tensor | None = None) -> Tensor:
    """The weight of fixed codes, float32 (N, K), with gradients to scale and zero.

    Args:
        codes: (N, K).
        scale: s (P, G), not 0, before it is rounded to its stored form.
        zero: (P, G), before it is rounded to a code.
    """
    shape = (codes.shape[0], codes.shape[1])
    parameters = stored(scale, grid, shape, zero)
    spread = parameters.map(lambda value: value[:, None, :, None])
    values = grid.decode(grid.tile(codes), spread)
    return grid.untile(through(values, values.detach().to(grid.storage).float()), shape)


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
