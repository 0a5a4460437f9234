"""What a sweep asks of an algorithm, and what the algorithm answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Solution:
    """A solver's result for one Linear.

    Attributes:
        weight: (N, K) the weight that the rest of the sweep uses.
        tensors: what is stored, by short name ("codes", "scale"). A "bias" (N,) is the Linear's new bias, and
            the rest of the sweep uses it.
    """

    weight: Tensor
    tensors: dict[str, Tensor]
    report: dict[str, Any] = field(default_factory=dict)


class Solver(Protocol):
    """An algorithm that works on one group of Linears at a time. Pure: no model, no files.

    Attributes:
        original: the accumulator also needs the original model's inputs: ``add(x, original)`` instead of
            ``add(x)``, both (B, S, K).
        at_once: groups get the inputs of the block as it was, and are replaced together; false where a solver
            does not say so: a group gets what the groups solved before it leave.
    """

    @property
    def original(self) -> bool:
        """See above."""

    def accumulator(self, names: Sequence[str], inputs: int) -> Any:
        """A fresh accumulator for a group of Linears with K inputs."""

    def solve(self, weights: dict[str, Tensor], accumulator: Any) -> dict[str, Solution]:
        """New weights for a group of Linears (N, K) by name, which are the module's own and not modified,
        given their filled accumulator."""

    def restore(self, name: str, tensors: dict[str, Tensor]) -> Tensor:
        """The weight (N, K) of a solution read back from disk."""
