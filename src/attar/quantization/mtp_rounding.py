"""Rounding the Linears of a multi-token prediction head by the model's method, on the states that feed it.

After a sweep the hidden states behind the last rounded block are there. The head runs on them and on the
embeddings of the next tokens, row by row as in training (models/mtp_head.py), and its Linears are solved
group by group in forward order, each with the inputs that the groups before it leave; experts of one kind are
one stage. All tokens count once. Solvers that compare with the original model's inputs get these inputs for
both.

A head of an unknown form is rounded to nearest, with a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attar.checkpoint.processes import Processes
from attar.errors import ModelError
from attar.models.loading.single_experts import SingleExperts
from attar.models.mtp_head import MtpHead, load_mtp_head
from attar.progress import Progress
from attar.quantization.grids import QuantizedTensor
from attar.quantization.layerwise import LayerSolver
from attar.quantization.plan import LayerPlan
from attar.walks.block_runner import read_reports, read_solutions, write_solutions
from attar.walks.offloaded_model import HiddenStates, OffloadedModel
from attar.walks.solvers import LinearSolver, SharedSolver, Solution

HELD = 2**31  # bytes of statistics that are filled in one pass
_EXPERT = re.compile(r"\.\d+\.(?=\w+$)")


@dataclass(frozen=True)
class HeadRounding:
    """Called with the hidden states after the last block (:data:`attar.walks.sweep.AfterBlocks`).

    Attributes:
        sites: the head's Linears by stored name.
        solver: whose layers are the sites, by module.
        file: of the solutions; one that is there is kept.
    """

    checkpoint: Any
    sites: Mapping[str, LayerPlan]
    solver: LayerSolver
    file: Path
    progress: Progress

    def __call__(
        self, offloaded: OffloadedModel, batches: Sequence[Tensor], hidden: HiddenStates, processes: Processes
    ) -> None:
        if processes.agreed(self.file.exists()):
            return
        source = self.checkpoint
        try:
            head = load_mtp_head(source.stacked if isinstance(source, SingleExperts) else source, apart=True)
        except ModelError as error:
            self.progress.log(f"note: {error.message}; it is rounded to nearest")
            return
        linears = {
            self.sites[stored].module: linear
            for stored, linear in head.linears.items()
            if stored in self.sites
        }
        solver = SharedSolver(self.solver, processes) if processes.count > 1 else self.solver
        with torch.no_grad():
            rows = _HeadRows(offloaded, batches, hidden, head.to(offloaded.device))
            solutions = solve_head(rows, linears, solver)
        if processes.first:
            write_solutions(self.file, solutions)
        processes.wait()

    def codes(self) -> dict[str, QuantizedTensor]:
        """By stored name; empty where the head was of an unknown form."""
        tensors = read_solutions(self.file) if self.file.exists() else {}
        return {
            stored: QuantizedTensor.from_tensors(site.grid, tensors[site.module])
            for stored, site in self.sites.items()
            if site.module in tensors
        }

    def reports(self) -> list[dict[str, Any]]:
        """One row a Linear."""
        return read_reports(self.file) if self.file.exists() else []


class _HeadRows:
    """Runs the head over all rows."""

    def __init__(
        self, offloaded: OffloadedModel, batches: Sequence[Tensor], hidden: HiddenStates, head: MtpHead
    ) -> None:
        self.offloaded, self.batches, self.hidden, self.head = offloaded, batches, hidden, head
        self.used = torch.cat([batch.flatten() for batch in batches]).unique()

    def __iter__(self) -> Iterator[Tensor]:
        """The head's output (S - 1, H) of each row of S tokens."""
        model, anatomy = self.offloaded.model, self.offloaded.anatomy
        with self.offloaded.with_lm_head(self.used):
            embed, norm = (model.get_submodule(name) for name in (anatomy.embedding, anatomy.final_norm))
            for number, batch in enumerate(self.batches):
                states = norm(self.hidden[number].to(self.offloaded.device))
                positions = torch.arange(batch.shape[1] - 1, device=states.device)
                for e, h in zip(embed(batch[:, 1:].to(states.device)), states[:, :-1], strict=True):
                    yield self.head(e, h, positions, None)


def solve_head(rows: Any, linears: Mapping[str, nn.Module], solver: LinearSolver) -> dict[str, Solution]:
    """Solutions of a head's Linears by name; their weights are replaced.

    Args:
        rows: running over it runs the head.
        linears: by name.
    """
    solutions: dict[str, Solution] = {}
    for stage in stages(groups(rows, linears), linears):
        filled = {names: solver.accumulator(names, _inputs(linears[names[0]])) for names in stage}
        hooks = [
            linears[names[0]].register_forward_pre_hook(
                lambda _, args, statistics=statistics: statistics.add(args[0])
            )
            for names, statistics in filled.items()
        ]
        try:
            for _ in rows:
                pass
        finally:
            for hook in hooks:
                hook.remove()
        for names in stage:
            statistics = filled.pop(names)
            weights = {name: linears[name].weight.detach() for name in names}
            for name, solution in solver.solve(weights, statistics).items():
                linears[name].weight = nn.Parameter(solution.weight, requires_grad=False)
                solutions[name] = Solution(torch.empty(0), solution.tensors, solution.report)
    return solutions


def groups(rows: Any, linears: Mapping[str, nn.Module]) -> list[tuple[str, ...]]:
    """Linears in forward order, as one row shows it; those with the very same input together."""
    order: list[tuple[str, Tensor]] = []
    hooks = [
        linear.register_forward_pre_hook(lambda _, args, name=name: order.append((name, args[0])))
        for name, linear in linears.items()
    ]
    try:
        with closing(iter(rows)) as runs:
            next(runs)
    finally:
        for hook in hooks:
            hook.remove()
    together: list[list[str]] = []
    last: Tensor | None = None
    for name, x in order:
        if last is x:
            together[-1].append(name)
        else:
            together.append([name])
            last = x
    return [tuple(names) for names in together]


def stages(
    together: Sequence[tuple[str, ...]], linears: Mapping[str, nn.Module]
) -> list[list[tuple[str, ...]]]:
    """Groups that are filled in one pass: each alone, the experts' gates and ups, the experts' downs; as many
    as :data:`HELD` holds."""
    kinds: dict[str, list[tuple[str, ...]]] = {}
    for names in together:
        kinds.setdefault(_EXPERT.sub(".N.", names[0]), []).append(names)
    passes = []
    for alike in kinds.values():
        count = max(1, HELD // (4 * _inputs(linears[alike[0][0]]) ** 2))
        passes += [list(alike[start : start + count]) for start in range(0, len(alike), count)]
    return passes


def _inputs(linear: nn.Module) -> int:
    columns: int = linear.weight.shape[1]  # type: ignore[index,union-attr,assignment]
    return columns
