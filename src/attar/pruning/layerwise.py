"""Zeros in one Linear at a time, as the sweep walk calls it: statistics of the inputs, the scores or the
solver, and the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attar.errors import NumericsError
from attar.pruning.criteria.wanda import InputNorms, wanda_scores
from attar.pruning.linears import Amounts, Linears
from attar.quantization.hessian import Hessian, factorize_, output_error
from attar.sparsity import Sparsity
from attar.walks.solvers import LinearSolver, Solution

PruneSolver = Callable[..., Tensor]
"""``solver(weight (N, K), H (K, K), sparsity, **options)``: the pruned weight (N, K), its zeros exact."""


@dataclass(frozen=True)
class LayerPruner(LinearSolver):
    """Sets weights of each Linear to zero.

    Attributes:
        linears: by module name.
        amounts: how many zeros, by module name.
        solver: also changes the weights that stay; None: Wanda's scores, and weights stay as they are.
        options: the solver's further arguments.
        factored: the solver also takes the factor of the Hessian.
        by_row: scores are compared within a row.
    """

    linears: Linears
    amounts: Amounts
    solver: PruneSolver | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    factored: bool = False
    by_row: bool = True

    @property
    def at_once(self) -> bool:
        """Scores are of the block as it is (Wanda, algorithm 1); weights that compensate see what the Linears
        before them have lost."""
        return self.solver is None

    def accumulator(self, names: Sequence[str], inputs: int) -> InputNorms | Hessian:
        """Empty statistics of a group."""
        return InputNorms(inputs) if self.solver is None else Hessian(inputs)

    def solve(self, weights: dict[str, Tensor], statistics: InputNorms | Hessian) -> dict[str, Solution]:
        """Prune the weights (N, K) of Linears that read the same inputs."""
        value = statistics.final() if isinstance(statistics, Hessian) else statistics.value()
        shared = dict(self.options)
        if self.factored:
            shared["factor"] = factorize_(value, shared["damp"], act_order=False)
        solutions = {}
        for name, weight in weights.items():
            stored = self._pruned(weight, value, self.amounts[name], shared).to(self.linears[name].dtype)
            if not torch.isfinite(stored).all():
                raise NumericsError(
                    f"{name}: a pruned weight is not finite in {stored.dtype}", hint="a larger --damp"
                )
            pruned = stored.to(weight.dtype)
            report = {
                "error": self._error(weight, pruned, statistics, value),
                "tokens": statistics.tokens,
                "unseen": statistics.unseen,
            }
            solutions[name] = Solution(pruned, {"weight": stored}, report)
        return solutions

    def restore(self, name: str, tensors: dict[str, Tensor]) -> Tensor:
        """The stored weight (N, K)."""
        return tensors["weight"]

    def _pruned(self, weight: Tensor, value: Tensor, amount: Sparsity, shared: Mapping[str, Any]) -> Tensor:
        if not amount.zeros:
            return weight
        if self.solver is not None:
            return self.solver(weight, value, amount, **shared)
        return weight.masked_fill(~amount.mask(wanda_scores(weight, value), by_row=self.by_row), 0.0)

    def _error(
        self, weight: Tensor, pruned: Tensor, statistics: InputNorms | Hessian, value: Tensor
    ) -> float:
        """The relative squared error of the layer's outputs."""
        if isinstance(statistics, InputNorms):
            return statistics.output_error(weight, pruned)
        return output_error(weight, pruned, value)
