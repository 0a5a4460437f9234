"""The sweep walk: block by block, with calibration activations, never more than one block in memory.

    hidden states of all batches = embeddings(tokens)
    for block in blocks:
        load the block's tensors
        for group of Linears with one input, in the order they run:      (true sequential)
            run the batches up to the group; its inputs go to one accumulator
            new weights = solver(weight, accumulator);  put them in place
        run the batches through the new block: its outputs are the next block's inputs
        write what the solver made of the block to disk, drop the block

Peak memory is the block, its activations (which spill to disk past a limit) and the accumulators of one
group, whatever the depth. Linears that get the very same input tensor (q/k/v, gate/up) share an accumulator,
found by running the block, not by their names. A finished block is one file; a killed sweep reads the
finished ones back, re-runs their forward passes only, and goes on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from attar.errors import NumericsError
from attar.progress import SILENT, Progress
from attar.walks.activations import Activations
from attar.walks.skeleton import Call, Skeleton, StopForward


class Accumulator(Protocol):
    """Sees the inputs of a group of Linears."""

    def add(self, x: Tensor) -> None:
        """Add a batch of inputs (..., K)."""


@dataclass(frozen=True)
class Solution:
    """What a solver makes of one Linear.

    Attributes:
        weight: (N, K) the weight to go on with.
        tensors: what to keep on disk, by short name ("codes", "scale").
        report: numbers for the card.
    """

    weight: Tensor
    tensors: dict[str, Tensor]
    report: dict[str, Any] = field(default_factory=dict)


class Solver(Protocol):
    """An algorithm as the sweep sees it. Pure: no model, no files."""

    def accumulator(self, inputs: int) -> Accumulator:
        """A fresh accumulator for a group of Linears with K inputs."""

    def solve(self, name: str, weight: Tensor, seen: Any) -> Solution:
        """New weight for the Linear ``name`` with weight (N, K), given its filled accumulator."""

    def restore(self, name: str, tensors: dict[str, Tensor]) -> Tensor:
        """The weight (N, K) of a solution read back from disk."""


@dataclass(frozen=True)
class Swept:
    """Where a sweep left its solutions: one safetensors file per block, tensors named ``module/short``.

    Attributes:
        files: one per block, in order.
        reports: one dict per solved Linear, in order, with its ``name``.
        block_of: module name to the number of its block.
    """

    files: tuple[Path, ...]
    reports: tuple[dict[str, Any], ...]
    block_of: dict[str, int]

    def tensors(self, block: int) -> dict[str, dict[str, Tensor]]:
        """Solution tensors of one block: module name to short name to tensor."""
        return _read(self.files[block])[0]


def sweep(
    checkpoint: Any,
    batches: Sequence[Tensor],
    solver: Solver,
    *,
    work: Path,
    select: Any = lambda name: True,
    spill_bytes: int = 4 * 2**30,
    device: str | torch.device = "cpu",
    progress: Progress = SILENT,
    what: str = "sweep",
) -> Swept:
    """Walk over the blocks of a checkpoint.

    Args:
        checkpoint: an opened checkpoint (attar.checkpoint.Checkpoint) with dense tensors.
        batches: int64 (B, S) token batches, none padded.
        solver: what to do with each Linear.
        work: folder for finished blocks and spilled activations; the sweep resumes from it.
        select: which Linears, by full module name, are solved.
        spill_bytes: activations beyond so many bytes live on disk.
        device: where the blocks run, in float32.

    Raises:
        NumericsError: a block's output is not finite.
    """
    work.mkdir(parents=True, exist_ok=True)
    skeleton = Skeleton(checkpoint, torch.device(device))
    store = Activations(work / "activations", spill_bytes)
    with torch.no_grad(), progress.task(what, total=len(skeleton.blocks)) as task:
        calls = skeleton.trace(batches, store)
        files: list[Path] = []
        reports: list[dict[str, Any]] = []
        block_of: dict[str, int] = {}
        for index, block in enumerate(skeleton.blocks):
            file = work / f"block-{index:05d}.safetensors"
            with skeleton.loaded(block):
                runner = _BlockRunner(block, calls, index, store, skeleton.device)
                if not file.exists():
                    _solve_block(runner, solver, select, file)
                else:
                    _restore_block(block, solver, file)
                runner.advance()
            found = _read(file)[1]
            files.append(file)
            reports.extend(found)
            block_of.update({report["name"]: index for report in found})
            errors = [float(report["error"]) for report in found if "error" in report]
            task.advance(**({"error": sum(errors) / len(errors)} if errors else {}))
    store.clear()
    return Swept(tuple(files), tuple(reports), block_of)


def _solve_block(runner: _BlockRunner, solver: Solver, select: Any, file: Path) -> None:
    """Solve the groups of one block in order and write the solutions beside, then rename."""
    tensors: dict[str, Tensor] = {}
    reports = []
    for group in runner.groups(select):
        seen = solver.accumulator(weight_of(runner.modules[group[0]]).shape[1])
        runner.feed(group, seen)
        for name in group:
            module = runner.modules[name]
            solution = solver.solve(name, weight_of(module), seen)
            put_weight(module, solution.weight)
            tensors.update(
                {f"{name}/{short}": tensor.contiguous() for short, tensor in solution.tensors.items()}
            )
            reports.append({"name": name, **solution.report})
    partial = file.with_suffix(".partial")
    save_file(tensors, partial, metadata={"reports": json.dumps(reports)})
    partial.rename(file)


def _restore_block(block: Any, solver: Solver, file: Path) -> None:
    modules = dict(block.module.named_modules())
    for name, tensors in _read(file)[0].items():
        put_weight(modules[name.removeprefix(block.name + ".")], solver.restore(name, tensors))


def _read(file: Path) -> tuple[dict[str, dict[str, Tensor]], list[dict[str, Any]]]:
    """A block file: solution tensors by module, and the reports."""
    found: dict[str, dict[str, Tensor]] = {}
    with safe_open(file, framework="pt") as opened:
        for key in opened.keys():  # noqa: SIM118  (not a dict)
            name, _, short = key.rpartition("/")
            found.setdefault(name, {})[short] = opened.get_tensor(key)
        reports = json.loads(opened.metadata()["reports"])
    return found, reports


def weight_of(module: nn.Module) -> Tensor:
    """The weight (N, K) of a Linear or a Conv1D (which stores it transposed)."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight if isinstance(module, nn.Linear) else weight.T


def put_weight(module: nn.Module, weight: Tensor) -> None:
    """Replace the weight (N, K) of a Linear or a Conv1D in place."""
    weight_of(module).copy_(weight)


class _BlockRunner:
    """One loaded block and its inputs."""

    def __init__(
        self,
        block: Any,
        calls: dict[tuple[int, ...], list[Call]],
        index: int,
        store: Activations,
        device: torch.device,
    ) -> None:
        self.block, self.store, self.device, self.index = block, store, device, index
        self.calls = calls
        self.modules = {f"{block.name}.{name}": module for name, module in block.module.named_modules()}

    def call(self, hidden: Tensor) -> Tensor:
        """The block's output hidden states."""
        output = self.calls[tuple(hidden.shape[:2])][self.index](self.block.module, hidden)
        return output if isinstance(output, Tensor) else output[0]

    def groups(self, select: Any) -> list[list[str]]:
        """The selected Linears in the order they run, those with the very same input together."""
        order: list[tuple[str, Tensor]] = []
        hooks = []
        for name in self.block.linears:
            if select(name):
                note = lambda _, args, name=name: order.append((name, args[0]))  # noqa: E731
                hooks.append(self.modules[name].register_forward_pre_hook(note))
        try:
            self.call(self.store[0].to(self.device))
        finally:
            for hook in hooks:
                hook.remove()
        groups: list[list[str]] = []
        inputs: list[Tensor] = []
        for name, x in order:
            if inputs and inputs[-1] is x:
                groups[-1].append(name)
            else:
                groups.append([name])
                inputs.append(x)
        return groups

    def feed(self, group: list[str], seen: Accumulator) -> None:
        """Run every batch up to the group and show its inputs to the accumulator."""

        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            seen.add(args[0])
            raise StopForward

        handle = self.modules[group[0]].register_forward_pre_hook(hook)
        try:
            for number in range(len(self.store)):
                try:
                    self.call(self.store[number].to(self.device))
                except StopForward:
                    continue
        finally:
            handle.remove()

    def advance(self) -> None:
        """Replace every batch's hidden states by the block's output."""
        for number in range(len(self.store)):
            output = self.call(self.store[number].to(self.device))
            if not torch.isfinite(output).all():
                raise NumericsError(
                    f"the output of {self.block.name} is not finite", hint="the model overflows float32"
                )
            self.store[number] = output
