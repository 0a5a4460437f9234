"""The sweep: over the model block by block, with calibration activations, one block in memory at a time.

    hidden states of all batches = embeddings(tokens)
    for block in blocks:
        load the block's tensors
        for group of Linears with one input, in forward order:      (true sequential)
            run the batches up to the group; its inputs go to one accumulator
            new weights = solver(weights, accumulator);  put them in place
        run the batches through the new block: its outputs are the next block's inputs
        write the solver's tensors of the block to disk, drop the block

A solver may also get the original model's inputs of the same Linears (two streams of hidden states), or
solve a block as a whole (learned rounding). Peak memory is the block, its activations (which spill to disk
beyond a limit) and the accumulators of one group, whatever the depth. Linears that get the very same input
tensor (q/k/v, gate/up) form a group and share an accumulator; groups are found by running the block, not by
names. The experts of a mixture are solved one by one from the mixture's input (expert_inputs.py). Each
finished block is one file. A resumed sweep reads these files, runs their forward passes only,
and continues.

Several processes each run a part of the batches, and share the Linears (shared_solver.py). A block that is
solved as a whole is the first process's.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from attar.checkpoint import atomic
from attar.checkpoint.processes import SINGLE_PROCESS, Processes
from attar.errors import NumericsError, SettingsError
from attar.interruption import Interruption, StateFile, interruptible
from attar.kernels.precision import reduced_products
from attar.models.anatomy.parts import weight_of
from attar.models.loading.device import bf16_products, free_memory, trim_memory
from attar.models.loading.experts import Experts
from attar.progress import SILENT, Progress
from attar.walks.distributed import agreed_precision, own_batches
from attar.walks.expert_inputs import ExpertInputs, ExpertTokens, SolvedTogether, stages
from attar.walks.offloaded_model import BlockCall, HiddenStates, OffloadedModel, on_meta
from attar.walks.passes import BlockPasses
from attar.walks.shared_solver import SharedSolver
from attar.walks.solvers import Solution, Solver

AfterBlocks = Callable[[OffloadedModel, Sequence[Tensor], HiddenStates, Processes], None]
"""``after_blocks(offloaded, batches, hidden, processes)``: gets the hidden states after the last block of the
batches that this process has run; the processes have the others."""


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
        names: full names of the selected Linears.
        modules: the Linear and Conv1D modules by those names.
        state: the state of the training, after each step; one that was stopped begins with it.
    """

    module: nn.Module
    names: list[str]
    modules: dict[str, nn.Module]
    count: int
    _runner: _BlockRunner
    state: StateFile = field(default_factory=StateFile)

    def inputs(self, number: int) -> Tensor:
        """Hidden states (B, S, D) after the blocks solved so far."""
        return self._runner.store[number].to(self._runner.device)

    def targets(self, number: int) -> Tensor:
        """The original block's output (B, S, D) on the original model's hidden states."""
        assert self._runner.originals is not None
        return self._runner.originals[number].to(self._runner.device)

    def __call__(self, hidden: Tensor, number: int) -> Tensor:
        """The block's output for hidden states of batch ``number`` (its masks and positions)."""
        return self._runner.call(self.module, hidden)


@dataclass(frozen=True)
class SweepResult:
    """Where a sweep left its solutions: one safetensors file per block, tensors named ``module/short``.

    Attributes:
        files: one per block, in order.
        reports: one dict per solved Linear, in order, with its ``name``.
        block_of: module name to the number of its block.
        precision: of the passes: ``bf16`` or ``fp32``.
    """

    files: tuple[Path, ...]
    reports: tuple[dict[str, Any], ...]
    block_of: dict[str, int]
    precision: str = ""

    def tensors(self, block: int) -> dict[str, dict[str, Tensor]]:
        """Solution tensors of one block: module name to short name to tensor."""
        return _read(self.files[block])


def sweep(
    checkpoint: Any,
    batches: Sequence[Tensor],
    solver: Solver | BlockSolver | None,
    *,
    work: Path,
    select: Callable[[str], bool] = lambda name: True,
    skip: Container[int] = (),
    spill_bytes: int | None = None,
    waiting_bytes: int | None = None,
    precision: str = "auto",
    prepare: Callable[[nn.Module], None] | None = None,
    after_blocks: AfterBlocks | None = None,
    processes: Processes = SINGLE_PROCESS,
    device: str | torch.device = "cpu",
    experts: ExpertTokens = ExpertTokens(),  # noqa: B008  (frozen)
    progress: Progress = SILENT,
    what: str = "sweep",
) -> SweepResult:
    """Walk over the blocks of a checkpoint.

    Args:
        checkpoint: an opened checkpoint (attar.checkpoint.Checkpoint) with dense tensors.
        batches: int64 (B, S) token batches, none padded.
        solver: for each Linear, or each block; None: nothing is solved, the hooks of ``prepare`` observe.
        work: folder for finished blocks and spilled activations, which the processes share; the sweep resumes
            from it.
        select: which Linears, by full module name, are solved.
        skip: numbers of blocks that the model no longer has: its hidden states pass them unchanged, only the
            original model's (of solvers that compare with it) go through.
        spill_bytes: hidden states beyond this many bytes are on disk. None: an eighth of the memory that is
            free at the start, at most 4 GiB.
        waiting_bytes: memory for passes that wait between two groups; beyond it they start again for each
            group, which takes two to three times as long and no memory. None: a quarter of the memory that is
            free at the start.
        precision: of the passes: "fp32", "bf16", or "auto" (bf16 where the device has fast products of it).
        prepare: called with the model, its parameters on the meta device, before anything runs: to hook what
            a solver does not see (keys and values, say). Hooks are also called with meta tensors.
        after_blocks: called at the end, see :data:`AfterBlocks`.
        processes: they make this sweep together. What hooks of ``prepare`` see is of this process's batches.
        device: where the blocks run; weights and hidden states between blocks are float32.
        experts: which tokens count for an expert of a mixture.

    Raises:
        NumericsError: a block's output is not finite.
        DataError: there are fewer rows than processes.
    """
    work.mkdir(parents=True, exist_ok=True)
    device = torch.device(device)
    precision = agreed_precision(processes, precision, device, work)
    fast = precision == "bf16"
    if spill_bytes is None:
        spill_bytes = min(4 * 2**30, free_memory(torch.device("cpu")) // (8 * processes.count))
    waiting = free_memory(device) // (4 * processes.count) if waiting_bytes is None else waiting_bytes
    offloaded = OffloadedModel(checkpoint, device)
    if prepare is not None:
        prepare(offloaded.model)
    mixtures = [module for module in offloaded.model.modules() if isinstance(module, Experts)]
    if experts.everything and any(one.scored for one in mixtures):
        allowed = f"routed: an expert of {offloaded.anatomy.family} gets its own tokens times their scores"
        raise SettingsError("moe_calibrate", "all", allowed)
    files = [work / f"block-{index:05d}.safetensors" for index in range(len(offloaded.blocks))]
    everyone = processes
    if hasattr(solver, "solve_block"):
        if not processes.first:
            processes.wait()
            return _result(files, precision)
        processes = SINGLE_PROCESS
    if processes.count > 1:
        batches = own_batches(batches, processes)
        solver = SharedSolver(solver, processes) if solver is not None else None
    store = HiddenStates(work / f"activations-{processes.rank}", spill_bytes)
    needs_originals = hasattr(solver, "solve_block") or bool(getattr(solver, "original", False))
    originals = HiddenStates(work / f"originals-{processes.rank}", spill_bytes) if needs_originals else None
    with torch.no_grad(), progress.task(what, total=len(offloaded.blocks)) as task:
        calls = offloaded.trace(batches, store)
        if originals is not None:
            for number in range(len(store)):
                originals[number] = store[number]
        for index, (block, file) in enumerate(zip(offloaded.blocks, files, strict=True)):
            runner = _BlockRunner(
                block, calls, index, store, originals, device, fast, waiting, experts, processes
            )
            groups = runner.groups(select) if solver is not None else []
            with offloaded.loaded(block):
                if index in skip:
                    runner.skip(file)
                elif processes.agreed(file.exists()):
                    runner.restore(solver, file)
                elif hasattr(solver, "solve_block"):
                    with interruptible() as interruption:
                        runner.solve_whole(cast(BlockSolver, solver), groups, file, interruption)
                else:
                    runner.solve(cast(Solver, solver), groups, file)
            processes.wait()  # for the first one's file
            errors = [float(report["error"]) for report in _reports(file) if "error" in report]
            task.advance(**({"error": sum(errors) / len(errors)} if errors else {}))
            trim_memory()
    if after_blocks is not None:
        after_blocks(offloaded, batches, store, processes)
    store.clear()
    if originals is not None:
        originals.clear()
    if processes is not everyone:
        everyone.wait()
    return _result(files, precision)


def _result(files: Sequence[Path], precision: str) -> SweepResult:
    """What the files of a finished sweep say."""
    reports = [_reports(file) for file in files]
    block_of = {report["name"]: index for index, rows in enumerate(reports) for report in rows}
    return SweepResult(tuple(files), tuple(row for rows in reports for row in rows), block_of, precision)


def _write(file: Path, solutions: dict[str, Solution]) -> None:
    """Write the solutions of one block."""
    tensors = {
        f"{name}/{short}": tensor.clone(memory_format=torch.contiguous_format)
        for name, solution in solutions.items()
        for short, tensor in solution.tensors.items()
    }
    reports = [{"name": name, **solution.report} for name, solution in solutions.items()]
    atomic.save_tensors(file, tensors, {"reports": json.dumps(reports)})


def _read(file: Path) -> dict[str, dict[str, Tensor]]:
    """The solution tensors of a block file, by module."""
    tensors: dict[str, dict[str, Tensor]] = {}
    with safe_open(file, framework="pt") as opened:
        for key in opened.keys():  # noqa: SIM118  (not a dict)
            name, _, short = key.rpartition("/")
            tensors.setdefault(name, {})[short] = opened.get_tensor(key)
    return tensors


def _reports(file: Path) -> list[dict[str, Any]]:
    """The reports of a block file."""
    with safe_open(file, framework="pt") as opened:
        reports: list[dict[str, Any]] = json.loads(opened.metadata()["reports"])
    return reports


def _put(module: Any, weight: Tensor, tensors: dict[str, Tensor]) -> None:
    """Give a Linear its new weight (N, K), and its new bias where there is one."""
    weight_of(module).copy_(weight)
    if "bias" in tensors:
        module.bias.copy_(tensors["bias"])


class _BlockRunner:
    """One block with its hidden states, and how the model calls it."""

    def __init__(
        self,
        block: Any,
        calls: dict[tuple[int, ...], list[BlockCall]],
        index: int,
        store: HiddenStates,
        originals: HiddenStates | None,
        device: torch.device,
        fast: bool,
        waiting_bytes: int,
        experts: ExpertTokens,
        processes: Processes,
    ) -> None:
        self.experts, self.processes = experts, processes
        self.block, self.calls, self.index = block, calls, index
        self.store, self.originals = store, originals
        self.device, self.fast, self.waiting_bytes = device, fast, waiting_bytes
        self.modules = {f"{block.name}.{name}": module for name, module in block.module.named_modules()}

    def call(self, module: nn.Module, hidden: Tensor) -> Tensor:
        """The output hidden states of the block (or of a copy of it)."""
        output = self.calls[tuple(hidden.shape[:2])][self.index](module, hidden)
        return output if isinstance(output, Tensor) else output[0]

    def groups(self, select: Callable[[str], bool]) -> list[list[str]]:
        """The selected Linears in forward order, those with the very same input together; found by running
        the block on the meta device."""
        order: list[tuple[str, Tensor]] = []
        hooks = []
        for name in self.block.linears:
            if select(name):
                note = lambda _, args, name=name: order.append((name, args[0]))  # noqa: E731
                hooks.append(self.modules[name].register_forward_pre_hook(note))
        hidden = self.store[0]
        call = self.calls[tuple(hidden.shape[:2])][self.index]
        try:
            BlockCall(on_meta(call.args), on_meta(call.kwargs), call.keyword)(
                self.block.module, hidden.to("meta")
            )
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

    def solve(self, solver: Solver, groups: list[list[str]], file: Path) -> None:
        """Solve the groups in forward order."""
        parts = stages(self.block, groups)
        original_module = None if self.originals is None else copy.deepcopy(self.block.module)
        original_passes = None
        if original_module is not None and self.originals is not None:
            original_passes = self._passes(original_module, self.originals, parts)
        passes = self._passes(self.block.module, self.store, parts)
        solutions: dict[str, Solution] = {}
        at_once = bool(getattr(solver, "at_once", False))
        try:
            for number, stage in enumerate(parts):
                held: list[ExpertInputs] = []
                if stage.holder is not None:
                    held.append(self._held(self.block.module, stage.holder, passes, number))
                    if original_module is not None and original_passes is not None:
                        held.append(self._held(original_module, stage.holder, original_passes, number))
                for group in stage.groups:
                    if held:
                        accumulator, more = self._filled_of_expert(solver, group, held)
                    else:
                        other = None if original_passes is None else original_passes.inputs(number)
                        accumulator, more = self._filled(solver, group, passes.inputs(number), other), {}
                    solved = solver.solve(self._weights(group), accumulator)
                    del accumulator  # as large as all weights of a wide block
                    for name in group:
                        solution = solved.pop(name)
                        solution.report.update(more)
                        if not at_once:
                            _put(self.modules[name], solution.weight, solution.tensors)
                        solutions[name] = replace(solution, weight=torch.empty(0))  # in place, or restored
                for inputs in held:
                    inputs.clear()
            if self.processes.first:
                _write(file, solutions)
            for name, solution in solutions.items() if at_once else ():
                _put(self.modules[name], solver.restore(name, solution.tensors), solution.tensors)
            self._replace(
                self.store,
                self._outputs(self.block.module, self.store) if at_once else passes.outputs(),
            )
            if original_passes is not None and self.originals is not None:
                self._replace(self.originals, original_passes.outputs())
        finally:
            passes.close()
            if original_passes is not None:
                original_passes.close()

    def _filled(
        self, solver: Solver, group: list[str], inputs: Iterator[Tensor], originals: Iterator[Tensor] | None
    ) -> Any:
        """The accumulator of one group, with all inputs."""
        accumulator = solver.accumulator(group, weight_of(self.modules[group[0]]).shape[1])
        pairs = ((x,) for x in inputs) if originals is None else zip(inputs, originals, strict=True)
        for pair in pairs:
            with reduced_products(self.fast):
                accumulator.add(*pair)
        return accumulator

    def _weights(self, group: list[str]) -> dict[str, Tensor]:
        return {name: weight_of(self.modules[name]).detach() for name in group}

    def _filled_of_expert(
        self, solver: Solver, group: list[str], held: list[ExpertInputs]
    ) -> tuple[Any, dict[str, Any]]:
        """The accumulator of one group of an expert, its gate and up, or its down; and what the reports say:
        how many tokens the router gave it."""
        path, _, leaf = group[0].rpartition(".")
        number = int(path.rpartition(".")[2])
        expert = list(held[0].experts)[number]
        widest = max(linear.weight.shape[1] for linear in expert.children())  # type: ignore[union-attr,index]
        rows, seen = held[0].rows(number, int(self.experts.floor * int(widest)))
        inner = leaf == expert.names[2]
        streams = [inputs.inputs(rows, list(inputs.experts)[number] if inner else None) for inputs in held]
        originals = streams[1] if len(streams) > 1 else None
        return self._filled(solver, group, streams[0], originals), {"routed": seen}

    def _held(self, module: nn.Module, holder: str, passes: BlockPasses, number: int) -> ExpertInputs:
        """The arguments of a mixture's experts in every batch."""
        experts = cast(Experts, module.get_submodule(holder))
        folder = self.store.folder / f"experts-{module is self.block.module:d}"
        held = ExpertInputs(
            experts, self.experts, folder, self.store.limit, self.device, self.fast, self.processes
        )
        for arguments in passes.arguments(number):
            held.add(*arguments)
        return held

    def solve_whole(
        self, solver: BlockSolver, groups: list[list[str]], file: Path, interruption: Interruption
    ) -> None:
        """Solve the block as a whole."""
        originals = cast(HiddenStates, self.originals)
        self._replace(originals, self._outputs(self.block.module, originals))
        names = [name for group in groups for name in group]
        modules = {name: self.modules[name] for name in names}
        state = StateFile(file.with_name("learning.pt"), interruption)
        view = BlockView(self.block.module, names, modules, len(self.store), self, state)
        solved = solver.solve_block(view)
        for name in names:
            _put(self.modules[name], solved[name].weight, solved[name].tensors)
        _write(file, {name: solved[name] for name in names})
        state.remove()
        self._replace(self.store, self._outputs(self.block.module, self.store))

    def skip(self, file: Path) -> None:
        """Run the original model's hidden states alone; nothing is solved."""
        if self.originals is not None:
            self._replace(self.originals, self._outputs(self.block.module, self.originals))
        if self.processes.first:
            _write(file, {})

    def restore(self, solver: Solver | BlockSolver | None, file: Path) -> None:
        """Put the weights of a finished block in place."""
        if self.originals is not None:
            self._replace(self.originals, self._outputs(self.block.module, self.originals))
        for name, tensors in _read(file).items():
            assert solver is not None, "a sweep without a solver stores nothing"
            _put(self.modules[name], solver.restore(name, tensors), tensors)
        self._replace(self.store, self._outputs(self.block.module, self.store))

    def _passes(self, module: nn.Module, store: HiddenStates, parts: list[SolvedTogether]) -> BlockPasses:
        inside = dict(module.named_modules())
        first = [stage.holder or stage.groups[0][0].removeprefix(self.block.name + ".") for stage in parts]
        stops = [inside[path] for path in first]
        groups = [group for stage in parts for group in stage.groups]
        return BlockPasses(
            lambda number: self.call(module, store[number].to(self.device)),
            len(store),
            stops,
            waiting=self._may_wait(groups),
            device=self.device,
            fast=self.fast,
        )

    def _may_wait(self, groups: list[list[str]]) -> bool:
        """Whether the tensors that waiting passes hold (about five hidden states and the widest input of each
        token) fit the limit."""
        hidden = self.store[0].shape[-1]
        widest = max((weight_of(self.modules[group[0]]).shape[1] for group in groups), default=0)
        tokens = len(self.store) * self.store[0].shape[:2].numel()
        streams = 1 if self.originals is None else 2
        return bool(tokens * streams * 4 * (5 * hidden + widest) <= self.waiting_bytes)

    def _outputs(self, module: nn.Module, store: HiddenStates) -> Iterator[Tensor]:
        for number in range(len(store)):
            with bf16_products(self.device, self.fast):
                output = self.call(module, store[number].to(self.device))
            yield output

    def _replace(self, store: HiddenStates, outputs: Iterator[Tensor]) -> None:
        """Replace every batch's hidden states by the block's output."""
        for number, output in enumerate(outputs):
            if not torch.isfinite(torch.stack(torch.aminmax(output))).all():
                raise NumericsError(
                    f"the output of {self.block.name} is not finite", hint="the model overflows float32"
                )
            store[number] = output.float()
