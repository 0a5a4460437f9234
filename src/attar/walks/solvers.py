"""What a sweep asks of an algorithm, and what the algorithm answers.

A sweep's solver in several processes, each of which runs a part of the calibration batches.

    sums      of a group's accumulators are added over the processes: each has the statistics of all batches
    dealing   each Linear of the group is solved by one process: the largest first, by the one with least work
    codes     go from that process to the others, which decode them as a resumed sweep does

The statistics differ from those of one process by the rounding of float32 sums alone: by at most T 2^-24 of
the sum of magnitudes for T tokens, in practice some 1e-7 of H's mean diagonal. A code changes where a weight
was that near to the middle between two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn

from attar.checkpoint.processes import Processes
from attar.interruption import StateFile
from attar.walks.offloaded_model import HiddenStates
from attar.walks.positions import PositionWeights


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


class LinearSolver(ABC):
    """An algorithm that works on one group of Linears at a time. Pure: no model, no files."""

    @property
    def original(self) -> bool:
        """The accumulator also needs the original model's inputs: ``add(x, original)`` instead of ``add(x)``,
        both (B, S, K)."""
        return False

    @property
    def at_once(self) -> bool:
        """Groups get the inputs of the block as it was, and are replaced together; otherwise a group gets
        what the groups solved before it leave."""
        return False

    @abstractmethod
    def accumulator(self, names: Sequence[str], inputs: int) -> Any:
        """A fresh accumulator for a group of Linears with K inputs. Where tokens count differently it gets
        ``add(x, importance=w)``, w (B, S). For several processes the accumulator has
        ``reduce(total)``, which replaces its sums by ``total`` of them."""

    @abstractmethod
    def solve(self, weights: dict[str, Tensor], accumulator: Any) -> dict[str, Solution]:
        """New weights for a group of Linears (N, K) by name, which are the module's own and not modified,
        given their filled accumulator."""

    @abstractmethod
    def restore(self, name: str, tensors: dict[str, Tensor]) -> Tensor | None:
        """The weight (N, K) of a solution read back from disk; None: it stayed as it was."""

    def units(self, names: list[str]) -> list[list[str]]:
        """The Linears of a group that several processes may not part."""
        return [[name] for name in names]


class BlockSolver(Protocol):
    """An algorithm that works on a whole block at a time."""

    def solve_block(self, view: BlockView) -> dict[str, Solution]:
        """New weights (N, K) for the view's Linears by name; the module is left as it was."""

    def restore(self, name: str, tensors: dict[str, Tensor]) -> Tensor:
        """The weight (N, K) of a solution read back from disk."""


@dataclass(frozen=True)
class BlockView:
    """A loaded block as a block solver sees it.

    Attributes:
        module: the block, float32, its original weights.
        modules: the selected Linear and Conv1D modules by their full names, in forward order.
        hidden: hidden states (B, S, D) of each batch after the blocks solved so far.
        originals: the original block's outputs (B, S, D) on the original model's hidden states.
        positions: how often tokens count.
        call: ``call(module, hidden)`` is the output of the block (its masks and positions).
        state: the state of the training, after each step; one that was stopped begins with it.
    """

    module: nn.Module
    modules: dict[str, nn.Module]
    hidden: HiddenStates
    originals: HiddenStates
    device: torch.device
    call: Callable[[nn.Module, Tensor], Tensor]
    state: StateFile = field(default_factory=StateFile)
    positions: PositionWeights = field(default_factory=PositionWeights)

    @property
    def names(self) -> list[str]:
        """Full names of the selected Linears."""
        return list(self.modules)

    @property
    def count(self) -> int:
        """How many batches there are."""
        return len(self.hidden)

    def inputs(self, number: int) -> Tensor:
        """Hidden states (B, S, D) of a batch after the blocks solved so far."""
        return self.hidden[number].to(self.device)

    def targets(self, number: int) -> Tensor:
        """The original block's output (B, S, D) on the original model's hidden states of a batch."""
        return self.originals[number].to(self.device)

    def importance(self, hidden: Tensor, name: str = "") -> Tensor | None:
        """How often each token (B, S) of hidden states (B, S, D) counts; None: all once.

        Args:
            name: a Linear's; "" for the block's output, whose gradient is that of the block's last Linear.
        """
        rows, length = hidden.shape[:2]
        return self.positions.importance([name or self.names[-1]], rows, length, hidden.device)

    def __call__(self, hidden: Tensor, number: int) -> Tensor:
        """The block's output for hidden states of batch ``number``."""
        return self.call(self.module, hidden)


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

    def restore(self, name: str, tensors: dict[str, Tensor]) -> Tensor | None:
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
        weight = self.restore(name, tensors) if tensors else None
        return Solution(weights[name] if weight is None else weight, tensors, report)
