"""AWQ: Lin, Tang, Tang, Yang, Chen, Wang, Dang, Gan, Han 2023, "AWQ: Activation-aware Weight Quantization for
LLM Compression and Acceleration", arXiv 2306.00978, equations 4 and 5, and the clip search of the authors'
code.

    Q(W diag(s)) diag(1/s) x ,   s = m^a ,   a* = argmin_a || (W - Q(W diag(s)) diag(1/s)) X^T ||^2

Letters: W (N, K) weight, N outputs, K inputs; X (T, K) calibration inputs; m (K,) mean of |X| over tokens;
s (K,) scale; a alpha in [0, 1); H (K, K) = 2 X^T X / T from hessian.py; E (N, K) the error, W - Q(W diag(s))
diag(1/s).

The output error of E is tr(E H E^T): no candidate needs a forward pass. Q is the grid of the result. Linears
with the same input share s, and their errors are added. a = 0 is s = 1, so the result is never worse than
round to nearest.

Differs from the paper: besides s = m^a the search tries s = m^a / w^(1-a), with w (K,) the mean over rows of
|W| relative to its tile's largest weight (as AutoAWQ does, and llm-compressor as "duo scaling"), and takes
the best. Candidates are measured on a sample of rows, the best of them and s = 1 on all rows. The clip search
measures a tile's error by its own diagonal block of H; its result is dropped where it does not lower the
total error of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attar.errors import NumericsError
from attar.kernels import columns as kernel
from attar.quantization.grids import Grid, IntGrid
from attar.quantization.hessian import Hessian, exact_energy, informed

if TYPE_CHECKING:
    from attar.models.anatomy.folding import Fold

POINTS = 20  # values of alpha
SMALLEST = 1e-4  # of m and w, so that no channel's scale is 0
SAMPLE = 128  # rows of a weight that candidates are measured on
CHUNK = 1 << 22  # weights whose ranges are tried at a time


class InputStatistics:
    """Statistics of a group's inputs for the search: H and the mean of |x|, in float32."""

    def __init__(self, inputs: int) -> None:
        self.hessian = Hessian(inputs)
        self.sum = torch.zeros(inputs, dtype=torch.float32)

    def add(self, x: Tensor, importance: Tensor | None = None) -> None:
        """Add a batch of inputs (..., K); tokens may count differently (importance (...))."""
        self.hessian.add(x, importance)
        sizes = x.reshape(-1, x.shape[-1]).float().abs()
        self.sum = self.sum.to(x.device) + (
            sizes.sum(0) if importance is None else importance.reshape(-1).to(sizes) @ sizes
        )

    def magnitude(self) -> Tensor:
        """m, float32 (K,); see :func:`attar.quantization.hessian.informed`."""
        return informed(self.sum / max(self.hessian.weight, 1e-30))


@dataclass(frozen=True)
class ScaleSearchResult:
    """Result of the scale search.

    Attributes:
        scale: s, float32 (K,); its largest and smallest value multiply to 1 unless channels share scales.
        alpha: a.
        weighted: w was used.
        error: || E X^T ||^2 / || W X^T ||^2 over all weights of the group.
        rtn_error: the same of round to nearest.
    """

    scale: Tensor
    alpha: float
    weighted: bool
    error: float
    rtn_error: float


def search_scale(
    weights: Sequence[Tensor],
    grids: Sequence[Grid],
    H: Tensor,
    magnitude: Tensor,
    *,
    weighted: bool = True,
    points: int = POINTS,
    sample: int = SAMPLE,
    share: Callable[[Tensor], Tensor] = lambda values: values,
) -> ScaleSearchResult:
    """The scale of the inputs that a group of Linears share. Does not modify its inputs.

    Args:
        weights: W (N_i, K) of each, any float type.
        H: (K, K) float32.
        magnitude: m (K,) float32.
        weighted: try s = m^a / w^(1-a) too.
        points: values of a: 0, 1 / points, ...
        sample: rows of each weight that candidates are measured on, where rows have scales of their own; 0:
            all.
        share: applied to m and w (K,); makes them equal over channels that must have one scale.

    Raises:
        NumericsError: a weight or H is not finite.
    """
    pieces = [weight.float() for weight in weights]
    if not (torch.isfinite(H).all() and all(torch.isfinite(piece).all() for piece in pieces)):
        raise NumericsError(
            "the weight or its Hessian holds NaN or infinity", hint="check the model and the calibration data"
        )
    m = share(magnitude.float()).clamp(min=SMALLEST)
    w = share(_relative_size(pieces, grids)).clamp(min=SMALLEST) if weighted else None
    few = [thinned(piece, grid, sample) for piece, grid in zip(pieces, grids, strict=True)]
    ones = torch.ones_like(m)
    best, least = (ones, 0.0, False), sum_of_errors(few, grids, H, ones)
    for step in range(points):
        alpha = step / points
        for divisor in (None, w) if weighted else (None,):
            s = share(scale_at(m, alpha, divisor))
            error = sum_of_errors(few, grids, H, s)
            if error < least:
                best, least = (s, alpha, divisor is not None), error
    energy = max(sum(quadratic(piece, H) for piece in pieces), 1e-30)
    plain = sum_of_errors(pieces, grids, H, ones) / energy
    error = sum_of_errors(pieces, grids, H, best[0]) / energy
    return (
        ScaleSearchResult(*best, error, plain)
        if error < plain
        else ScaleSearchResult(ones, 0.0, False, plain, plain)
    )


def thinned(weight: Tensor, grid: Grid, sample: int) -> Tensor:
    """Evenly spaced rows of a weight, at most ``sample``; all where rows share scales."""
    if not sample or grid.rows != 1 or len(weight) <= sample:
        return weight
    return weight[torch.linspace(0, len(weight) - 1, sample, device=weight.device).long()]


def sum_of_errors(weights: Sequence[Tensor], grids: Sequence[Grid], H: Tensor, s: Tensor) -> float:
    """|| E X^T ||^2 summed over the weights, or over the given samples of their rows."""
    return sum(quadratic(residual(p, g, s), H) for p, g in zip(weights, grids, strict=True))


def scale_at(m: Tensor, alpha: float, w: Tensor | None = None) -> Tensor:
    """s = m^a, or m^a / w^(1-a), divided by the root of its largest times its smallest value (K,)."""
    s = m.pow(alpha) if w is None else m.pow(alpha) / w.pow(1.0 - alpha)
    s = s.clamp(min=SMALLEST)
    return s / (s.max() * s.min()).sqrt()


def residual(weight: Tensor, grid: Grid, s: Tensor) -> Tensor:
    """E = W - Q(W diag(s)) diag(1/s), float32 (N, K)."""
    scaled = weight * s
    return weight - grid.quantize(scaled, grid.choose(scaled)).dequantize() / s


def quadratic(E: Tensor, H: Tensor) -> float:
    """tr(E H E^T)."""
    return float(((E @ H) * E).sum(dtype=torch.float64))


def _relative_size(weights: Sequence[Tensor], grids: Sequence[Grid]) -> Tensor:
    """w (K,): mean over the rows of all weights of |W| relative to the largest in its tile."""
    sums, rows = torch.zeros(weights[0].shape[1], device=weights[0].device), 0
    for weight, grid in zip(weights, grids, strict=True):
        tiled = grid.tile(weight.abs())
        relative = tiled / tiled.amax((1, 3), keepdim=True).clamp(min=1e-30)
        sums += grid.untile(relative, (weight.shape[0], weight.shape[1])).sum(0)
        rows += weight.shape[0]
    return sums / rows


@dataclass(frozen=True)
class ClipSearchResult:
    """Result of the clip search.

    Attributes:
        shrink: (P, G) factor on the range of each tile, for ``grid.choose``.
        error: tr(E H E^T) with it.
        rtn_error: the same without.
    """

    shrink: Tensor
    error: float
    rtn_error: float


def search_clip(
    weight: Tensor, H: Tensor, grid: Grid, *, smallest: float = 0.5, points: int = POINTS
) -> ClipSearchResult:
    """How far to shrink the range of each tile of a weight. Does not modify its inputs.

    Args:
        weight: W (N, K), any float type.
        H: (K, K) float32.
        smallest: lower bound of the factors, itself not tried.
        points: factors tried, evenly from the grid's reach down; where the grid is signed, their negatives
            too.
    """
    W = weight.float()
    blocks = diagonal_blocks(H, grid.group_size or W.shape[1])
    best = torch.ones(grid.tiles((W.shape[0], W.shape[1])), device=W.device)
    least = torch.full_like(best, torch.inf)
    factors = [grid.reach - (grid.reach - smallest) * step / points for step in range(points)]
    factors += [-factor for factor in factors] if grid.signed else []
    for shrink, error in zip(factors, _trials(W, grid, blocks, factors), strict=True):
        better = error < least
        best = torch.where(better, torch.full_like(best, shrink), best)
        least = torch.where(better, error, least)
    ones = torch.ones_like(best)
    clipped, plain = (exact_energy(_rounding_error(W, grid, shrink), H) for shrink in (best, ones))
    return ClipSearchResult(best, clipped, plain) if clipped < plain else ClipSearchResult(ones, plain, plain)


def diagonal_blocks(H: Tensor, width: int) -> Tensor:
    """The blocks (G, c, c) on the diagonal of H (K, K), the last filled up with zeros."""
    blocks = H.new_zeros(-(-len(H) // width), width, width, dtype=torch.float32)
    for number, block in enumerate(blocks):
        at = slice(number * width, min((number + 1) * width, len(H)))
        block[: at.stop - at.start, : at.stop - at.start] = H[at, at]
    return blocks


def _trials(W: Tensor, grid: Grid, blocks: Tensor, factors: Sequence[float]) -> Iterable[Tensor]:
    """The error of each tile (P, G) for each factor; compiled where scales depend on the range alone. The
    compiled loop does not round a decoded value to the storage type."""
    compiled = W.device.type == "cpu" and kernel.available(W.device)
    if grid.searches or grid.rows != 1 or grid.code_book() is None or not compiled:
        return (tile_errors(W, grid, blocks, factor) for factor in factors)
    parts, shared = W.split(max(1, CHUNK // W.shape[1])), grid.shared_with(grid.choose(W, 1.0))
    return list(torch.cat([_compiled_errors(rows, shared, blocks, factors) for rows in parts], 1))


def _compiled_errors(W: Tensor, grid: Grid, blocks: Tensor, factors: Sequence[float]) -> Tensor:
    """The error of each tile (T, P, G) for T factors."""
    ranged, ends = grid, W
    if isinstance(grid, IntGrid):  # both ends of a range stand for its tile
        tiles = grid.tile(W)
        ranged = replace(grid, group_size=2)
        ends = torch.stack((tiles.amax(3), tiles.amin(3)), -1).flatten(1)
    chosen = [ranged.choose(ends, factor) for factor in factors]
    zeros = [tiled.zero for tiled in chosen if tiled.zero is not None]
    scale, zero = torch.stack([tiled.scale for tiled in chosen]), torch.stack(zeros) if zeros else None
    book = grid.code_book()
    assert book is not None, "the caller looks for it"
    return kernel.tile_errors(book, W, blocks, scale, zero).transpose(1, 2)


def tile_errors(weight: Tensor, grid: Grid, blocks: Tensor, shrink: float) -> Tensor:
    """tr(E_pg H_gg E_pg^T) of each tile (P, G) when every range is multiplied by ``shrink``."""
    E = grid.tile(_rounding_error(weight, grid, shrink))
    P, r, G, c = E.shape
    flat = E.permute(2, 0, 1, 3).reshape(G, P * r, c)
    return ((flat @ blocks) * flat).sum(-1).reshape(G, P, r).sum(-1).T


def _rounding_error(weight: Tensor, grid: Grid, shrink: float | Tensor) -> Tensor:
    return grid.quantize(weight, grid.choose(weight, shrink)).dequantize().neg_().add_(weight)


@dataclass(frozen=True)
class AWQRule:
    """AWQ's rule for smoothing.ScaleSolver."""

    def accumulator(self, inputs: int) -> InputStatistics:
        """Hessian and mean magnitudes."""
        return InputStatistics(inputs)

    def find(
        self, fold: Fold, weights: list[Tensor], grids: list[Grid], statistics: InputStatistics
    ) -> tuple[Tensor, dict[str, Any]]:
        """The scale of a fold (K,), and numbers for the report."""
        H = statistics.hessian.value()
        result = search_scale(
            weights, grids, H, statistics.magnitude(), share=lambda values: fold.share(values, "mean")
        )
        numbers = {
            "alpha": result.alpha,
            "weighted": result.weighted,
            "error": result.error,
            "rtn_error": result.rtn_error,
        }
        return result.scale, numbers
