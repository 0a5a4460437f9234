"""SmoothQuant's and AWQ's scales of folds, by the sweep walk; no weight is changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from attar.models.anatomy.folding import Fold
from attar.quantization.grids import Grid
from attar.quantization.transforms.awq import AWQRule
from attar.quantization.transforms.smoothquant import SmoothQuantRule
from attar.walks.solvers import LinearSolver, Solution


class _IgnoredInputs:
    """An accumulator for inputs whose statistics another group collects."""

    def add(self, x: Tensor, importance: Tensor | None = None) -> None:
        """Ignore a batch."""


class ScaleSolver(LinearSolver):
    """Finds the scales of folds during a sweep; changes no weight.

    A fold's scale is found where the first of its consumers runs. Where a norm feeds attention and MLP in
    parallel, the consumers run in two groups; the weights of the later ones are read from the checkpoint.

    Args:
        rule: finds a scale.
        grids: by module name; the search leaves other consumers out. None: all are used, without grids.
        load: a Linear's weight (N, K) by module name.
    """

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
        """The rule's statistics of a group's inputs; none for the later group of a fold."""
        return (
            self.rule.accumulator(inputs) if any(name in self.starts for name in names) else _IgnoredInputs()
        )

    def solve(self, weights: dict[str, Tensor], statistics: Any) -> dict[str, Solution]:
        """The weights as they are; the first consumer's solution carries ``scale`` (K,)."""
        solutions = {name: Solution(weight, {}) for name, weight in weights.items()}
        for name in weights:
            if name in self.starts:
                fold = self.starts[name]
                counted = self.counted[fold.producer]
                pieces = [weights[name] if name in weights else self.load(name) for name in counted]
                grids = [] if self.grids is None else [self.grids[name] for name in counted]
                scale, numbers = self.rule.find(fold, pieces, grids, statistics)
                solutions[name] = Solution(weights[name], {"scale": scale.cpu()}, numbers)
        return solutions

    def restore(self, name: str, tensors: dict[str, Tensor]) -> Tensor:
        """The weight (N, K), unchanged."""
        return self.load(name)
