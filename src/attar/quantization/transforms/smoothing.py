"""Finding the scales of folds with the sweep walk: SmoothQuant and AWQ as solvers that change no weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attar.models.folding import Fold
from attar.quantization.grids import Grid
from attar.quantization.transforms.awq import InputStatistics, search_scale
from attar.quantization.transforms.smoothquant import ActivationMaxima, migration, search_migration
from attar.walks.sweep import Solution


@dataclass(frozen=True)
class SmoothQuantRule:
    """SmoothQuant as :class:`ScaleSolver` uses it.

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
        self, fold: Fold, weights: list[Tensor], grids: list[Grid], seen: ActivationMaxima
    ) -> tuple[Tensor, dict[str, Any]]:
        """The scale of a fold (K,), and numbers for the report."""
        if self.alpha is not None:
            return migration(seen.largest, weights, self.alpha, fold.share), {"alpha": self.alpha}
        result = search_migration(seen, weights, grids, self.activations, share=fold.share)
        numbers = {"alpha": result.alpha, "error": result.error, "rtn_error": result.plain_error}
        return result.scale, numbers


@dataclass(frozen=True)
class AWQRule:
    """AWQ as :class:`ScaleSolver` uses it."""

    def accumulator(self, inputs: int) -> InputStatistics:
        """Hessian and mean magnitudes."""
        return InputStatistics(inputs)

    def find(
        self, fold: Fold, weights: list[Tensor], grids: list[Grid], seen: InputStatistics
    ) -> tuple[Tensor, dict[str, Any]]:
        """The scale of a fold (K,), and numbers for the report."""
        H = seen.hessian.value()
        result = search_scale(
            weights, grids, H, seen.magnitude(), share=lambda values: fold.share(values, "mean")
        )
        numbers = {
            "alpha": result.alpha,
            "weighted": result.weighted,
            "error": result.error,
            "rtn_error": result.rtn_error,
        }
        return result.scale, numbers


class _Nothing:
    """An accumulator for inputs that were seen in another group."""

    def add(self, x: Tensor) -> None:
        """Forget it."""


class ScaleSolver:
    """Finds the scales of folds as the sweep walks; leaves every weight as it is.

    A fold's scale is found where the first of its consumers runs. Where a norm feeds attention and MLP side
    by side, the consumers run in two groups; the weights of the later ones are read from the checkpoint.

    Args:
        folds: the folds wanted.
        rule: how a scale is found.
        grids: by module name; consumers that are missing do not count. None: all count, no grid is needed.
        load: a Linear's weight (N, K) by module name.
    """

    original = False

    def __init__(
        self,
        folds: Sequence[Fold],
        rule: SmoothQuantRule | AWQRule,
        grids: Mapping[str, Grid] | None,
        load: Callable[[str], Tensor],
    ) -> None:
        self.folds, self.rule, self.grids, self.load = folds, rule, grids, load
        self.counted = {
            fold.producer: [name for name in fold.consumers if grids is None or name in grids]
            for fold in folds
        }
        self.first = {producer: names[0] for producer, names in self.counted.items()}
        self.starts = {self.first[fold.producer]: fold for fold in folds}
        self.known = {name for names in self.counted.values() for name in names}

    def selects(self, name: str) -> bool:
        """Whether the sweep must stop at a Linear."""
        return name in self.known

    def accumulator(self, names: Sequence[str], inputs: int) -> Any:
        """What the rule wants to see of a group's inputs; nothing for the later group of a fold."""
        return self.rule.accumulator(inputs) if any(name in self.starts for name in names) else _Nothing()

    def solve(self, weights: dict[str, Tensor], seen: Any) -> dict[str, Solution]:
        """The weights as they are; the first consumer's solution carries ``scale`` (K,)."""
        solutions = {name: Solution(weight, {}) for name, weight in weights.items()}
        for name in weights:
            if name in self.starts:
                fold = self.starts[name]
                counted = self.counted[fold.producer]
                pieces = [weights[each] if each in weights else self.load(each) for each in counted]
                grids = [] if self.grids is None else [self.grids[each] for each in counted]
                scale, numbers = self.rule.find(fold, pieces, grids, seen)
                solutions[name] = Solution(weights[name], {"scale": scale.cpu()}, numbers)
        return solutions

    def restore(self, name: str, tensors: dict[str, Tensor]) -> Tensor:
        """The weight (N, K), unchanged."""
        return self.load(name)
