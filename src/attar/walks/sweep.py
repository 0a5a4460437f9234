"""The sweep: over the model block by block, with calibration activations, one block in memory at a time.

    hidden states of all batches = embeddings(tokens)
    for block in blocks:
        load the block's tensors
        for group of Linears with one input, in forward order:      (true sequential)
            run the batches up to the group; its inputs go to one accumulator
            new weights = solver(weights, accumulator);  put them in place
        run the batches through the new block: its outputs are the next block's inputs
        write the solver's tensors of the block to disk, drop the block

A solver may also get the original model's inputs of the same Linears (two streams of hidden states);
:func:`sweep_blocks` solves a block as a whole (learned rounding), and :func:`observe` solves nothing. Peak
memory is the block, its activations (which spill to disk beyond a limit) and the accumulators of one group,
whatever the depth. Linears that get the very same input tensor (q/k/v, gate/up) form a group and share an
accumulator, except where positions count otherwise for them (positions.py); groups are found by running the
block, not by names. The experts of a mixture are solved one by
one from the mixture's input (expert_inputs.py). Each finished block is one file. A resumed sweep reads these
files, runs their forward passes only, and continues.

Several processes each run a part of the batches, and share the Linears (solvers.py). A block that is
solved as a whole is the first process's.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attar.checkpoint.processes import SINGLE_PROCESS, Processes
from attar.errors import SettingsError
from attar.interruption import interruptible
from attar.models.loading.device import free_memory, trim_memory
from attar.models.loading.experts import Experts
from attar.progress import SILENT, Progress
from attar.walks.block_runner import BlockRunner, SweepState, read_reports, read_solutions
from attar.walks.distributed import agreed_precision, own_batches
from attar.walks.expert_inputs import ExpertTokens
from attar.walks.offloaded_model import HiddenStates, OffloadedModel
from attar.walks.positions import PositionWeights
from attar.walks.solvers import BlockSolver, LinearSolver, SharedSolver

AfterBlocks = Callable[[OffloadedModel, Sequence[Tensor], HiddenStates, Processes], None]
"""``after_blocks(offloaded, batches, hidden, processes)``: gets the hidden states after the last block of the
batches that this process has run; the processes have the others."""


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """How a sweep goes.

    Attributes:
        work: folder for finished blocks and spilled activations, which the processes share; the sweep resumes
            from there.
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
        positions: how often tokens count.
        what: name of the task in the progress.
    """

    work: Path
    select: Callable[[str], bool] = lambda name: True
    skip: Container[int] = ()
    spill_bytes: int | None = None
    waiting_bytes: int | None = None
    precision: str = "auto"
    prepare: Callable[[nn.Module], None] | None = None
    after_blocks: AfterBlocks | None = None
    processes: Processes = SINGLE_PROCESS
    device: str | torch.device = "cpu"
    experts: ExpertTokens = field(default_factory=ExpertTokens)
    positions: PositionWeights = field(default_factory=PositionWeights)
    progress: Progress = SILENT
    what: str = "sweep"


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
    precision: str

    @classmethod
    def read(cls, files: Sequence[Path], precision: str) -> SweepResult:
        """What the files of a finished sweep say."""
        reports = [read_reports(file) for file in files]
        block_of = {report["name"]: index for index, rows in enumerate(reports) for report in rows}
        return cls(tuple(files), tuple(row for rows in reports for row in rows), block_of, precision)

    def tensors(self, block: int) -> dict[str, dict[str, Tensor]]:
        """Solution tensors of one block: module name to short name to tensor."""
        return read_solutions(self.files[block])


def sweep_linears(
    checkpoint: Any, batches: Sequence[Tensor], solver: LinearSolver, options: SweepOptions
) -> SweepResult:
    """Walk over the blocks of a checkpoint, and solve the Linears of each group by group.

    Args:
        checkpoint: an opened checkpoint (attar.checkpoint.Checkpoint) with dense tensors.
        batches: int64 (B, S) token batches, none padded.

    Raises:
        NumericsError: a block's output is not finite.
        DataError: there are fewer rows than processes.
    """
    sweep = _Sweep(checkpoint, options)
    if options.processes.count > 1:
        batches, solver = own_batches(batches, options.processes), SharedSolver(solver, options.processes)

    with closing(sweep.unsolved(batches, solver.restore, originals=solver.original)) as blocks:
        for runner, groups, file in blocks:
            runner.solve(solver, groups, file)
    return sweep.result()


def sweep_blocks(
    checkpoint: Any, batches: Sequence[Tensor], solver: BlockSolver, options: SweepOptions
) -> SweepResult:
    """Walk over the blocks of a checkpoint, and solve each as a whole; of several processes the first does
    all the work. Arguments and errors are those of :func:`sweep_linears`."""
    sweep = _Sweep(checkpoint, options)
    if not options.processes.first:
        options.processes.wait()
        return sweep.result()
    sweep.options = replace(options, processes=SINGLE_PROCESS)
    with closing(sweep.unsolved(batches, solver.restore, originals=True)) as blocks:
        for runner, groups, file in blocks:
            with interruptible() as interruption:
                runner.solve_whole(solver, groups, file, interruption)
    options.processes.wait()
    return sweep.result()


def observe(checkpoint: Any, batches: Sequence[Tensor], options: SweepOptions) -> SweepResult:
    """Walk over the blocks of a checkpoint, which stay as they are: the hooks of ``options.prepare`` observe.
    Arguments and errors are those of :func:`sweep_linears`."""
    sweep = _Sweep(checkpoint, replace(options, select=lambda name: False))
    if options.processes.count > 1:
        batches = own_batches(batches, options.processes)
    with closing(sweep.unsolved(batches, _none_stored, originals=False)) as blocks:
        for runner, _, file in blocks:
            runner.observe(file)
    return sweep.result()


def _none_stored(name: str, tensors: dict[str, Tensor]) -> Tensor:
    raise AssertionError("the file of an observed block holds no solutions")


class _Sweep:
    """A model that is about to be walked over."""

    def __init__(self, checkpoint: Any, options: SweepOptions) -> None:
        self.options, work = options, options.work
        work.mkdir(parents=True, exist_ok=True)
        self.device = torch.device(options.device)
        self.precision = agreed_precision(options.processes, options.precision, self.device, work)
        self.offloaded = OffloadedModel(checkpoint, self.device)
        if options.prepare is not None:
            options.prepare(self.offloaded.model)
        mixtures = [module for module in self.offloaded.model.modules() if isinstance(module, Experts)]
        if options.experts.everything and any(experts.scored for experts in mixtures):
            family = self.offloaded.anatomy.family
            allowed = f"routed: an expert of {family} gets its own tokens times their scores"
            raise SettingsError("moe_calibrate", "all", allowed)
        self.files = [work / f"block-{index:05d}.safetensors" for index in range(len(self.offloaded.blocks))]

    def unsolved(
        self,
        batches: Sequence[Tensor],
        restore: Callable[[str, dict[str, Tensor]], Tensor | None],
        *,
        originals: bool,
    ) -> Generator[tuple[BlockRunner, list[list[str]], Path], None, None]:
        """Run the batches through all blocks. Yields each that has no solutions yet, loaded, with its groups
        of Linears and its file: the caller writes the solutions there, and replaces the hidden states by the
        block's outputs. No gradient is recorded in between.

        Args:
            restore: the weight (N, K) of a solution read back from disk; None: it stayed.
            originals: the hidden states of the original model are run too.
        """
        options, offloaded = self.options, self.offloaded
        with self._state(batches, originals) as state:
            with torch.no_grad(), options.progress.task(options.what, total=len(self.files)) as task:
                for index, (block, file) in enumerate(zip(offloaded.blocks, self.files, strict=True)):
                    runner = BlockRunner(state, block, index)
                    groups = runner.groups(options.select)
                    with offloaded.loaded(block):
                        if index in options.skip:
                            runner.skip(file)
                        elif options.processes.agreed(file.exists()):
                            runner.restore(restore, file)
                        else:
                            yield runner, groups, file
                    options.processes.wait()  # for the first one's file
                    errors = [float(row["error"]) for row in read_reports(file) if "error" in row]
                    task.advance(**({"error": sum(errors) / len(errors)} if errors else {}))
                    trim_memory()
            if options.after_blocks is not None:
                options.after_blocks(offloaded, batches, state.hidden, options.processes)

    def result(self) -> SweepResult:
        """What the files of the blocks say."""
        return SweepResult.read(self.files, self.precision)

    @contextmanager
    def _state(self, batches: Sequence[Tensor], originals: bool) -> Iterator[SweepState]:
        """The hidden states before the first block; their files are deleted after the last."""
        options, processes = self.options, self.options.processes
        spill_bytes, waiting_bytes = options.spill_bytes, options.waiting_bytes
        if spill_bytes is None:
            spill_bytes = min(4 * 2**30, free_memory(torch.device("cpu")) // (8 * processes.count))
        if waiting_bytes is None:
            waiting_bytes = free_memory(self.device) // (4 * processes.count)
        hidden = HiddenStates(options.work / f"activations-{processes.rank}", spill_bytes)
        copies = (
            HiddenStates(options.work / f"originals-{processes.rank}", spill_bytes) if originals else None
        )
        with torch.no_grad():
            calls = self.offloaded.trace(batches, hidden)
        if copies is not None:
            for number in range(len(hidden)):
                copies[number] = hidden[number]
        fast = self.precision == "bf16"
        positions = options.positions if self.offloaded.anatomy.causal else PositionWeights()
        yield SweepState(
            calls, hidden, copies, self.device, fast, waiting_bytes, options.experts, positions, processes
        )
        hidden.clear()
        if copies is not None:
            copies.clear()
