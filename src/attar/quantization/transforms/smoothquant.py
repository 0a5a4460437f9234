"""SmoothQuant: Xiao, Lin, Seznec, Wu, Demouth, Han 2022, "SmoothQuant: Accurate and Efficient Post-Training
Quantization for Large Language Models", arXiv 2211.10438, equation 4.

    Y = (X diag(1/s)) (diag(s) W^T) ,   s_j = max|X_j|^a / max|W_j|^(1-a)

Letters: X (T, K) calibration inputs, T tokens; W (N, K) weight, N outputs, K inputs; X_j, W_j their columns;
s (K,) scale; a alpha, the migration strength: 0 leaves the weights as flat as possible, 1 the activations.

max|W_j| runs over all Linears with the same input. The paper has one a for the whole model (0.5; 0.75 for
some). Differs from the paper: without a given a, each group takes the one with the least || X W^T - Q(X
diag(1/s)) Q(W diag(s))^T ||^2 on a sample of tokens, with the real grids of weights and activations; s = 1 is
among the candidates, so a searched scale is never worse than none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attar.errors import NumericsError
from attar.quantization.grids import Grid
from attar.quantization.hessian import informed

if TYPE_CHECKING:
    from attar.models.anatomy.folding import Fold

ALPHAS = tuple(step / 20 for step in range(21))
SAMPLE = 512  # tokens kept for the search
SMALLEST = 1e-5  # of a column's largest value and of s


class ActivationMaxima:
    """max|X_j| of a group's inputs, and a sample of its tokens: every 2^i-th, with the smallest i that fits.

    Args:
        inputs: K.
        sample: tokens kept at most; 0: none.
    """

    def __init__(self, inputs: int, sample: int = SAMPLE) -> None:
        self.largest = torch.zeros(inputs, dtype=torch.float32)
        self.limit, self.stride, self.tokens = sample, 1, 0
        self.kept: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        """Add a batch of inputs (..., K)."""
        rows = x.reshape(-1, x.shape[-1]).float()
        self.largest = torch.maximum(self.largest.to(x.device), rows.abs().amax(0))
        if self.limit:
            self.kept.append(rows[-self.tokens % self.stride :: self.stride].clone())
        self.tokens += rows.shape[0]
        while self.limit and sum(map(len, self.kept)) > self.limit:
            self.kept, self.stride = [torch.cat(self.kept)[::2].clone()], self.stride * 2

    def sample(self) -> Tensor:
        """The kept tokens, float32 (T', K), T' <= limit."""
        return torch.cat(self.kept) if self.kept else self.largest.new_zeros(0, len(self.largest))


@dataclass(frozen=True)
class Migration:
    """The chosen migration.

    Attributes:
        scale: s, float32 (K,).
        alpha: a; None: s = 1 was best.
        error: || Y - Q(X / s) Q(W s)^T ||^2 / || Y ||^2 over all weights of the group, on the sample; None:
            not searched.
        plain_error: the same with s = 1.
    """

    scale: Tensor
    alpha: float | None
    error: float | None = None
    plain_error: float | None = None


def migration(
    x: Tensor, weights: Sequence[Tensor], alpha: float, share: Callable[[Tensor], Tensor] = lambda v: v
) -> Tensor:
    """s of equation 4, float32 (K,). Does not modify its inputs.

    Args:
        x: max|X_j| (K,); see :func:`attar.quantization.hessian.informed` for channels that were always zero.
        weights: W (N_i, K) of all Linears with this input.
        alpha: a, 0 to 1.
        share: applied to both maxima (K,); makes them equal over channels that must have one scale.
    """
    w = torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0)
    x, w = share(informed(x.float())).clamp(min=SMALLEST), share(w).clamp(min=SMALLEST)
    s = x.pow(alpha) / w.pow(1.0 - alpha)
    return share(s).clamp(min=SMALLEST)  # powers of equal numbers may differ in a bit


def search_migration(
    seen: ActivationMaxima,
    weights: Sequence[Tensor],
    grids: Sequence[Grid],
    activations: Grid | None,
    *,
    alphas: Sequence[float] = ALPHAS,
    share: Callable[[Tensor], Tensor] = lambda v: v,
) -> Migration:
    """The migration strength with the least output error on the sample. Does not modify its inputs.

    Args:
        seen: the group's inputs.
        weights: W (N_i, K) of each Linear, any float type.
        activations: the number format of X (T, K), one row a token; None: X is not rounded.
        share: as in :func:`migration`.

    Raises:
        NumericsError: no token was seen, or a weight or the inputs are not finite.
    """
    X, pieces = seen.sample(), [weight.float() for weight in weights]
    if not len(X) or not all(torch.isfinite(tensor).all() for tensor in (X, *pieces)):
        raise NumericsError(
            "the inputs or weights of a layer hold NaN or infinity, or no token was seen",
            hint="check the model and the calibration data",
        )
    Y = [X @ piece.T for piece in pieces]
    energy = max(sum(float(y.double().square().sum()) for y in Y), 1e-30)

    def error(s: Tensor) -> float:
        rounded = X / s if activations is None else nearest(X / s, activations)
        return (
            sum(
                float((y - rounded @ nearest(piece * s, grid).T).double().square().sum())
                for y, piece, grid in zip(Y, pieces, grids, strict=True)
            )
            / energy
        )

    ones = torch.ones_like(seen.largest)
    plain = error(ones)
    best = Migration(ones, None, plain, plain)
    for alpha in alphas:
        s = migration(seen.largest, pieces, alpha, share)
        trial = error(s)
        if best.error is None or trial < best.error:
            best = Migration(s, alpha, trial, plain)
    return best


def nearest(values: Tensor, grid: Grid) -> Tensor:
    """Values (rows, K) rounded to the grid, float32."""
    return grid.quantize(values, grid.choose(values)).dequantize()


@dataclass(frozen=True)
class SmoothQuantRule:
    """SmoothQuant's rule for smoothing.ScaleSolver.

    Attributes:
        activations: format of the inputs, or None.
        alpha: migration strength; None: searched.
    """

    activations: Grid | None
    alpha: float | None

    def accumulator(self, inputs: int) -> ActivationMaxima:
        """Largest magnitudes, and a sample where there is a search."""
        return ActivationMaxima(inputs) if self.alpha is None else ActivationMaxima(inputs, 0)

    def find(
        self, fold: Fold, weights: list[Tensor], grids: list[Grid], statistics: ActivationMaxima
    ) -> tuple[Tensor, dict[str, Any]]:
        """The scale of a fold (K,), and numbers for the report."""
        if self.alpha is not None:
            return migration(statistics.largest, weights, self.alpha, fold.share), {"alpha": self.alpha}
        result = search_migration(statistics, weights, grids, self.activations, share=fold.share)
        numbers = {"alpha": result.alpha, "error": result.error, "rtn_error": result.plain_error}
        return result.scale, numbers
