"""How the range of each tile is chosen: by its largest magnitude, a percentile, or least squared error.

    absmax:       r = 1
    percentile:   r = quantile_p(|w|) / max|w|
    mse:          r = argmin over R of  e(r) = sum v (w - w'(r))^2;  R and -R where the grid is signed

Letters: r factor on a tile's range, the grids' ``shrink``; w weights of a tile; w'(r) the decoded weights
when the range is r times the range of the grid's rule; v (K,) importance of an input; R the factors tried.

The error is measured with the grid's own encode and decode and the rounding to its storage type, so that the
levels, the rounding of scales and the zero are taken into account. A grid whose own rule searches
(``Grid.searches``, the k-quants) takes the importance itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.errors import SettingsError
from attar.quantization.grids.grid import Grid, TileParameters

HOWS = ("absmax", "percentile", "mse")
CHUNK = 1 << 18  # weights measured at a time: they stay in the cache


def choose_scales(
    weight: Tensor,
    grid: Grid,
    how: str = "absmax",
    importance: Tensor | None = None,
    *,
    percentile: float = 0.999,
    low: float = 0.5,
    high: float | None = None,
    steps: int = 31,
) -> TileParameters:
    """Parameters of each tile. Does not modify its inputs.

    Args:
        weight: (N, K), any float type.
        how: "absmax", "percentile" or "mse".
        importance: (K,), not negative, weight of each input's squared error (the diagonal of H); None: 1.
            Used by "mse".
        percentile: p, the part of a tile's magnitudes that stays in range.
        low: smallest factor of "mse".
        high: largest factor of "mse"; None: 1.1, as a grid's own rule may clip, or the grid's reach.
        steps: number of factors that "mse" tries in addition to 1; no error is above the error of "absmax".

    Raises:
        SettingsError: ``how``, ``percentile`` or the range of factors is not allowed.
    """
    if how not in HOWS:
        raise SettingsError("how", how, " or ".join(HOWS))
    if not 0.0 < percentile <= 1.0:
        raise SettingsError("percentile", percentile, "above 0 and at most 1")
    high = max(1.1, grid.reach) if high is None else high
    if not (0.0 < low <= high and steps >= 1):
        raise SettingsError("low", low, "above 0 and at most high, with at least one step")
    if how == "absmax":
        return grid.choose(weight)
    if how == "percentile":
        return grid.choose(weight, within(weight, grid, percentile))
    if grid.searches:
        return grid.choose(weight, importance=importance)
    factors = torch.linspace(low, high, steps).tolist()
    factors += [-factor for factor in factors] if grid.signed else []
    return _better(weight, grid, _searched(weight, grid, importance, factors), importance)


def within(weight: Tensor, grid: Grid, percentile: float) -> Tensor:
    """r of each tile (P, G), the interpolated quantile of its magnitudes over the largest; 1 where all are
    zero. The padding of ragged tiles is excluded."""
    magnitudes = grid.tile(weight).abs().permute(0, 2, 1, 3).flatten(2)
    ones = torch.ones(weight.shape, dtype=torch.uint8, device=weight.device)
    counts = grid.tile(ones).sum((1, 3))
    rank = (1.0 - percentile) * (counts - 1)  # from the largest downwards
    above = rank.floor()
    largest = magnitudes.topk(min(int(above.max()) + 2, magnitudes.shape[2]), dim=2).values
    upper = largest.gather(2, above.long()[..., None])[..., 0]
    below = (above + 1).minimum(counts - 1).long()
    lower = largest.gather(2, below[..., None])[..., 0]
    quantile = upper + (lower - upper) * (rank - above)
    top = largest[..., 0]
    factor = quantile / torch.where(top > 0, top, torch.ones_like(top))
    return torch.where(factor > 0, factor, torch.ones_like(factor))


def squared_error(
    weight: Tensor, grid: Grid, parameters: TileParameters, importance: Tensor | None = None
) -> Tensor:
    """e of each tile (P, G), float32, of round to nearest, a few rows at a time."""
    count, columns = weight.shape
    width = grid.group_size or columns
    rows = grid.by_row(parameters, count)
    v = torch.ones(columns, device=weight.device) if importance is None else importance.float()
    v = torch.nn.functional.pad(v.to(weight.device), (0, -columns % width)).reshape(-1, width)
    step = max(1, CHUNK // columns)
    parts = []
    for start in range(0, count, step):
        x = weight[start : start + step].float()
        x = torch.nn.functional.pad(x, (0, -columns % width)).reshape(len(x), -1, width)
        at = rows.map(lambda value, start=start: value[start : start + step, :, None])  # type: ignore[misc]
        decoded = grid.decode(grid.encode(x, at), at).to(grid.storage).float()
        parts.append(decoded.sub_(x).square_().mul_(v).sum(-1))
    height = grid.rows or count
    error = torch.nn.functional.pad(torch.cat(parts), (0, 0, 0, -count % height))
    return error.reshape(-1, height, error.shape[1]).sum(1)


def _searched(weight: Tensor, grid: Grid, importance: Tensor | None, factors: list[float]) -> TileParameters:
    """Every tile with its best factor."""
    best = squared_error(weight, grid, grid.choose(weight, 1.0), importance)
    factor = torch.ones_like(best)
    for trial in factors:
        error = squared_error(weight, grid, grid.choose(weight, trial), importance)
        better = error < best
        best, factor = torch.where(better, error, best), torch.where(better, trial, factor)
    return grid.choose(weight, factor)


def _better(
    weight: Tensor, grid: Grid, searched: TileParameters, importance: Tensor | None
) -> TileParameters:
    """The searched parameters, unless the grid's plain rule has less error: tiles can depend on each other
    (double quantization)."""
    plain = grid.choose(weight)
    lost = squared_error(weight, grid, searched, importance).double().sum()
    return searched if lost <= squared_error(weight, grid, plain, importance).double().sum() else plain
