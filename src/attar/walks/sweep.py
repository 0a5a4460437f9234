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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from attar.errors import CheckpointError, NumericsError
from attar.models.names import stored_names
from attar.progress import SILENT, Progress


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
    skeleton = _Skeleton(checkpoint, torch.device(device))
    store = _Activations(work / "activations", spill_bytes)
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


class _StopForward(Exception):  # noqa: N818  (control flow, not an error)
    """Ends a forward pass once all it was run for has been seen."""


@dataclass(frozen=True)
class _Call:
    """How the model calls a block: everything but the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keyword: bool  # the hidden states come as a keyword argument

    def __call__(self, module: nn.Module, hidden: Tensor) -> Any:
        if self.keyword:
            return module(*self.args, hidden_states=hidden, **self.kwargs)
        return module(hidden, *self.args, **self.kwargs)


class _Skeleton:
    """The model with nothing loaded but what stands before its blocks."""

    def __init__(self, checkpoint: Any, device: torch.device) -> None:
        from attar.models.anatomy import discover
        from attar.models.load import empty_model

        self.checkpoint, self.device = checkpoint, device
        self.model = empty_model(checkpoint.config).eval()
        self.anatomy = discover(self.model)
        self.blocks = self.anatomy.blocks
        self.names = stored_names(self.model, checkpoint)

    def trace(self, batches: Sequence[Tensor], store: _Activations) -> dict[tuple[int, ...], list[_Call]]:
        """Run what stands before the blocks: hidden states go to the store; returns, by batch shape, how each
        block is called."""
        self._load_outer(torch.cat([batch.flatten() for batch in batches]).unique())
        kinds = self._output_kind(batches[0])
        calls: dict[tuple[int, ...], list[_Call]] = {}
        for number, batch in enumerate(batches):
            seen, hidden = self._record(batch, kinds)
            calls.setdefault(tuple(batch.shape), seen)
            store[number] = hidden
        self._drop_outer()
        return calls

    def _record(self, batch: Tensor, extra: int | None) -> tuple[list[_Call], Tensor]:
        """One pass with every block replaced by a recorder that returns what it is given."""
        seen: list[_Call] = []
        first: list[Tensor] = []

        def recorder(*args: Any, **kwargs: Any) -> Any:
            keyword = not args
            hidden = kwargs.pop("hidden_states") if keyword else args[0]
            first.append(hidden)
            seen.append(_Call(args[1:], kwargs, keyword))
            if len(seen) == len(self.blocks):
                raise _StopForward
            return hidden if extra is None else (hidden, *[None] * extra)

        for block in self.blocks:
            block.module.forward = recorder
        try:
            self.model(input_ids=batch.to(self.device), **self._no_cache())
        except _StopForward:
            pass
        finally:
            for block in self.blocks:
                del block.module.forward
        return seen, first[0]

    def _no_cache(self) -> dict[str, bool]:
        return {"use_cache": False} if self.anatomy.causal else {}

    def _output_kind(self, batch: Tensor) -> int | None:
        """None when a block returns a tensor; the number of further entries when it returns a tuple."""
        calls, hidden = self._record_first(batch[:1])
        with self.loaded(self.blocks[0]):
            output = calls(self.blocks[0].module, hidden)
        return None if isinstance(output, Tensor) else len(output) - 1

    def _record_first(self, batch: Tensor) -> tuple[_Call, Tensor]:
        blocks, self.blocks = self.blocks, self.blocks[:1]
        try:
            calls, hidden = self._record(batch, None)
        finally:
            self.blocks = blocks
        return calls[0], hidden

    def _load_outer(self, used: Tensor) -> None:
        """Materialise what runs before the blocks; of the embedding only the rows that the tokens use."""
        for name, parameter in self._outer():
            module, leaf = self._owner(name)
            if name == f"{self.anatomy.embedding}.weight":
                rows = _rows(self.checkpoint, self.names[name], used)
                setattr(module, leaf, nn.Parameter(rows.float().to(self.device), requires_grad=False))
                self.remap = _remap(module, used.to(self.device), parameter.shape[0])
            else:
                value = self.checkpoint.load(self.names[name]).to(self.device, torch.float32)
                setattr(module, leaf, nn.Parameter(value, requires_grad=False))
        for _, buffer in self.model.named_buffers():
            buffer.data = buffer.data.to(self.device)

    def _drop_outer(self) -> None:
        for name, parameter in self._outer():
            module, leaf = self._owner(name)
            setattr(
                module, leaf, nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
            )
        self.remap.remove()

    def _outer(self) -> list[tuple[str, Tensor]]:
        """Parameters outside the blocks and before them: neither final norm nor head is ever run."""
        after = tuple(f"{name}." for name in (self.anatomy.final_norm, self.anatomy.head) if name)
        inside = f"{self.anatomy.blocks_name}."
        return [
            (name, parameter)
            for name, parameter in self.model.named_parameters()
            if not name.startswith(inside) and not (after and name.startswith(after)) and name in self.names
        ]

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        path, _, leaf = name.rpartition(".")
        return self.model.get_submodule(path), leaf

    @contextmanager
    def loaded(self, block: Any) -> Iterator[None]:
        """The block's parameters in memory, in float32, for the length of the context."""
        names = [name for name, _ in block.module.named_parameters()]
        for name in names:
            full = f"{block.name}.{name}"
            value = self.checkpoint.load(self.names[full]).to(self.device, torch.float32)
            if not torch.isfinite(value).all():
                raise NumericsError(
                    f"{self.names[full]} holds NaN or infinity", hint="the checkpoint is damaged"
                )
            _set(block.module, name, value)
        try:
            yield
        finally:
            for name in names:
                _set(block.module, name, torch.empty_like(block.module.get_parameter(name), device="meta"))


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, nn.Parameter(value, requires_grad=False))


def _rows(checkpoint: Any, name: str, used: Tensor, chunk: int = 8192) -> Tensor:
    """The used rows of a stored matrix, read a chunk at a time so that the matrix is never whole in
    memory."""
    info = checkpoint.tensors[name]
    kept = []
    for start in range(0, info.shape[0], chunk):
        wanted = used[(used >= start) & (used < start + chunk)] - start
        if len(wanted):
            with safe_open(info.file, framework="pt") as opened:
                kept.append(opened.get_slice(name)[start : start + chunk][wanted])
    rows = torch.cat(kept)
    if len(rows) != len(used):
        raise CheckpointError(f"the data has token {int(used.max())}, but {name} has {info.shape[0]} rows")
    return rows


def _remap(module: nn.Module, used: Tensor, vocabulary: int) -> Any:
    """Make an embedding that holds the used rows only take the original token numbers."""
    lookup = torch.zeros(vocabulary, dtype=torch.int64, device=used.device)
    lookup[used] = torch.arange(len(used), device=used.device)
    module.padding_idx = None  # type: ignore[assignment]
    return module.register_forward_pre_hook(lambda _, args: (lookup[args[0]], *args[1:]))


class _BlockRunner:
    """One loaded block and its inputs."""

    def __init__(
        self,
        block: Any,
        calls: dict[tuple[int, ...], list[_Call]],
        index: int,
        store: _Activations,
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
            raise _StopForward

        handle = self.modules[group[0]].register_forward_pre_hook(hook)
        try:
            for number in range(len(self.store)):
                try:
                    self.call(self.store[number].to(self.device))
                except _StopForward:
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


class _Activations:
    """Hidden states by batch number, in memory up to a limit and on disk beyond it."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit, self.held = folder, limit, 0
        self.kept: dict[int, Tensor | Path] = {}

    def __len__(self) -> int:
        return len(self.kept)

    def __setitem__(self, number: int, value: Tensor) -> None:
        value = value.detach().to("cpu")
        old = self.kept.get(number)
        if isinstance(old, Tensor):
            self.held -= old.nbytes
        if self.held + value.nbytes <= self.limit:
            self.kept[number] = value
            self.held += value.nbytes
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{number}.safetensors"
        save_file({"hidden": value.contiguous()}, file)
        self.kept[number] = file

    def __getitem__(self, number: int) -> Tensor:
        value = self.kept[number]
        if isinstance(value, Tensor):
            return value
        with safe_open(value, framework="pt") as opened:
            hidden: Tensor = opened.get_tensor("hidden").clone()
        return hidden

    def clear(self) -> None:
        """Forget everything, on disk too."""
        for value in self.kept.values():
            if isinstance(value, Path):
                value.unlink(missing_ok=True)
        self.kept.clear()
        if self.folder.is_dir():
            self.folder.rmdir()
