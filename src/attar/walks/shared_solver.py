"""A sweep's solver in several processes, each of which runs a part of the calibration batches.

    sums      of a group's accumulators are added over the processes: each has the statistics of all batches
    dealing   each Linear of the group is solved by one process: the largest first, by the one with least work
    codes     go from that process to the others, which decode them as a resumed sweep does

The statistics differ from those of one process by the rounding of float32 sums alone: by at most T 2^-24 of
the sum of magnitudes for T tokens, in practice some 1e-7 of H's mean diagonal. A code changes where a weight
was that near to the middle between two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from attar.checkpoint.processes import Processes
from attar.walks.solvers import LinearSolver, Solution


@dataclass(frozen=True)
class SharedSolver(LinearSolver):
    """A solver that several processes share."""

    solver: LinearSolver
    processes: Processes

    @property
    def original(self) -> bool:
        """Of the solver."""
        return self.solver.original

    @property
    def at_once(self) -> bool:
        """Of the solver."""
        return self.solver.at_once

    def accumulator(self, names: Sequence[str], inputs: int) -> Any:
        """Of the solver; for the batches of this process."""
        return self.solver.accumulator(names, inputs)

    def solve(self, weights: dict[str, Tensor], accumulator: Any) -> dict[str, Solution]:
        """Every process gets the solutions of all Linears (N, K)."""
        accumulator.reduce(self.processes.total)
        units = self.solver.units(list(weights))
        owners = self.processes.partition_by_size(
            [sum(weights[name].numel() for name in unit) for unit in units]
        )
        owner_of = {name: owner for unit, owner in zip(units, owners, strict=True) for name in unit}
        assigned = {name: weight for name, weight in weights.items() if owner_of[name] == self.processes.rank}
        solved = self.solver.solve(assigned, accumulator) if assigned else {}
        return {name: self._shared(name, owner_of[name], solved, weights) for name in weights}

    def units(self, names: list[str]) -> list[list[str]]:
        """Of the solver."""
        return self.solver.units(names)

    def restore(self, name: str, tensors: dict[str, Tensor]) -> Tensor:
        """Of the solver."""
        return self.solver.restore(name, tensors)

    def _shared(
        self, name: str, owner: int, solved: Mapping[str, Solution], weights: Mapping[str, Tensor]
    ) -> Solution:
        """The owner's solution of a Linear, on every process."""
        device = weights[name].device
        solution = solved.get(name)
        head: list[Any] = [None]
        if solution is not None:
            head = [
                ({key: (tuple(t.shape), t.dtype) for key, t in solution.tensors.items()}, solution.report),
            ]
        distributed.broadcast_object_list(head, src=owner)
        shapes, report = head[0]
        tensors: dict[str, Tensor] = {}
        for key, (shape, dtype) in shapes.items():
            sent = solution.tensors[key].to(device).contiguous() if solution else None
            tensors[key] = torch.empty(shape, dtype=dtype, device=device) if sent is None else sent
            distributed.broadcast(tensors[key].view(-1).view(torch.uint8), src=owner)
        weight = self.restore(name, tensors) if tensors else weights[name]
        return Solution(weight, tensors, report)
