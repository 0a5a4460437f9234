"""One block of a sweep with the hidden states before it: groups of Linears, outputs, and the file of its
solutions (safetensors: tensors named ``module/short``, reports in the header)."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from attar.checkpoint import atomic
from attar.checkpoint.processes import Processes
from attar.errors import NumericsError
from attar.interruption import Interruption, StateFile
from attar.kernels.precision import reduced_products
from attar.models.anatomy.parts import weight_of
from attar.models.loading.device import bf16_products
from attar.models.loading.experts import Experts
from attar.walks.expert_inputs import ExpertInputs, ExpertTokens, SolvedTogether, stages
from attar.walks.offloaded_model import BlockCall, HiddenStates, on_meta
from attar.walks.passes import BlockPasses
from attar.walks.positions import PositionWeights
from attar.walks.solvers import BlockSolver, BlockView, LinearSolver, Solution


@dataclass(frozen=True)
class SweepState:
    """What the blocks of a sweep share.

    Attributes:
        calls: how the model calls each block, by the shape (B, S) of a batch.
        hidden: hidden states of each batch before the next block.
        originals: those of the original model; None where no solver compares with it.
        fast: products in bfloat16 inside the blocks.
        waiting_bytes: memory for passes that wait between two groups.
        experts: which tokens count for an expert.
        positions: how often tokens count.
        processes: those that make the sweep together.
    """

    calls: dict[tuple[int, ...], list[BlockCall]]
    hidden: HiddenStates
    originals: HiddenStates | None
    device: torch.device
    fast: bool
    waiting_bytes: int
    experts: ExpertTokens
    positions: PositionWeights
    processes: Processes


@dataclass(frozen=True)
class _Stream:
    """Hidden states that run through a block, or through a copy of it with its original weights."""

    module: nn.Module
    hidden: HiddenStates
    passes: BlockPasses


class BlockRunner:
    """One block, its weights loaded, with the hidden states before it."""

    def __init__(self, state: SweepState, block: Any, index: int) -> None:
        self.state, self.block, self.index = state, block, index
        self.modules = {f"{block.name}.{name}": module for name, module in block.module.named_modules()}

    def call(self, module: nn.Module, hidden: Tensor) -> Tensor:
        """The output hidden states of the block (or of a copy of it)."""
        output = self.state.calls[tuple(hidden.shape[:2])][self.index](module, hidden)
        return output if isinstance(output, Tensor) else output[0]

    def groups(self, select: Callable[[str], bool]) -> list[list[str]]:
        """The selected Linears in forward order, those with the very same input together; found by running
        the block on the meta device."""
        selected = [name for name in self.block.linears if select(name)]
        if not selected:
            return []
        order: list[tuple[str, Tensor]] = []
        hooks = []
        for name in selected:
            note = lambda _, args, name=name: order.append((name, args[0]))  # noqa: E731
            hooks.append(self.modules[name].register_forward_pre_hook(note))
        hidden = self.state.hidden[0]
        call = self.state.calls[tuple(hidden.shape[:2])][self.index]
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

    def solve(self, solver: LinearSolver, groups: list[list[str]], file: Path) -> None:
        """Solve the groups in forward order."""
        parts, state = stages(self.block, groups), self.state
        solutions: dict[str, Solution] = {}
        with ExitStack() as stack:
            streams = []
            if state.originals is not None:
                streams.append(self._stream(copy.deepcopy(self.block.module), state.originals, parts))
            streams.insert(0, self._stream(self.block.module, state.hidden, parts))
            for stream in streams:
                stack.enter_context(closing(stream.passes))
            for number, part in enumerate(parts):
                holder = part.holder
                held = [self._of_experts(stream, holder, number) for stream in streams] if holder else []
                for group in part.groups:
                    alike, more = [group], dict[str, Any]()
                    if held:
                        accumulators, more = self._filled_of_expert(solver, group, held)
                    else:
                        alike = state.positions.parts(solver.units(group))
                        inputs = [stream.passes.inputs(number) for stream in streams]
                        accumulators = self._filled(solver, alike, inputs)
                    solved: dict[str, Solution] = {}
                    for names in alike:
                        solved |= solver.solve(self._weights(names), accumulators.pop(0))
                    for name in group:
                        solution = solved.pop(name)
                        solution.report.update(more)
                        if not solver.at_once:
                            _put(self.modules[name], solution.weight, solution.tensors)
                        solutions[name] = replace(solution, weight=torch.empty(0))  # in place, or restored
                for arguments in held:
                    arguments.clear()
            if state.processes.first:
                write_solutions(file, solutions)
            for name, solution in solutions.items() if solver.at_once else ():
                _put(self.modules[name], solver.restore(name, solution.tensors), solution.tensors)
            for stream in streams:
                again = solver.at_once and stream.hidden is state.hidden  # its passes had the weights before
                outputs = self._outputs(stream.module, stream.hidden) if again else stream.passes.outputs()
                self._replace(stream.hidden, outputs)

    def _filled(
        self,
        solver: LinearSolver,
        parts: list[list[str]],
        streams: list[Iterator[Tensor]],
        chosen: list[Tensor] | None = None,
    ) -> list[Any]:
        """The accumulators of the parts of one group, with all inputs (B, S, K), and those of the original
        model; of an expert's, with the inputs (T, K) of the tokens that are chosen of each batch."""
        columns = weight_of(self.modules[parts[0][0]]).shape[1]
        accumulators = [solver.accumulator(part, columns) for part in parts]
        for number, inputs in enumerate(zip(*streams, strict=True)):
            rows, length = self.state.hidden[number].shape[:2]
            for part, accumulator in zip(parts, accumulators, strict=True):
                importance = self.state.positions.importance(part, rows, length, self.state.device)
                if importance is not None and chosen is not None:
                    of_tokens = importance.flatten()  # scored inputs repeat all tokens for each expert
                    importance = of_tokens[chosen[number].to(of_tokens.device) % len(of_tokens)]
                weighed = {} if importance is None else {"importance": importance}
                with reduced_products(self.state.fast):
                    accumulator.add(*inputs, **weighed)
        return accumulators

    def _weights(self, group: list[str]) -> dict[str, Tensor]:
        return {name: weight_of(self.modules[name]).detach() for name in group}

    def _filled_of_expert(
        self, solver: LinearSolver, group: list[str], held: list[ExpertInputs]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The accumulator of one group of an expert, its gate and up, or its down; and what the reports say:
        how many tokens the router gave it."""
        path, _, leaf = group[0].rpartition(".")
        number = int(path.rpartition(".")[2])
        expert = list(held[0].experts)[number]
        parts = [expert.get_submodule(name) for name in expert.names if name]  # not the activation
        widest = max(part.weight.shape[1] for part in parts)  # type: ignore[union-attr,index]
        rows, seen = held[0].rows(number, int(self.state.experts.floor * int(widest)))
        inner = leaf == expert.names[2]
        streams = [inputs.inputs(rows, list(inputs.experts)[number] if inner else None) for inputs in held]
        return self._filled(solver, [group], streams, rows), {"routed": seen}

    def _of_experts(self, stream: _Stream, holder: str, number: int) -> ExpertInputs:
        """The arguments of a mixture's experts in every batch."""
        state = self.state
        experts = cast(Experts, stream.module.get_submodule(holder))
        folder = state.hidden.folder / f"experts-{stream.hidden is state.hidden:d}"
        limit = state.hidden.limit
        held = ExpertInputs(experts, state.experts, folder, limit, state.device, state.fast, state.processes)
        for arguments in stream.passes.arguments(number):
            held.add(*arguments)
        return held

    def solve_whole(
        self, solver: BlockSolver, groups: list[list[str]], file: Path, interruption: Interruption
    ) -> None:
        """Solve the block as a whole."""
        hidden, originals = self.state.hidden, self.state.originals
        assert originals is not None
        self._replace(originals, self._outputs(self.block.module, originals))
        modules = {name: self.modules[name] for group in groups for name in group}
        training = StateFile(file.with_name("learning.pt"), interruption)
        view = BlockView(
            self.block.module,
            modules,
            hidden,
            originals,
            self.state.device,
            self.call,
            training,
            self.state.positions,
        )
        solved = solver.solve_block(view)
        for name in modules:
            _put(self.modules[name], solved[name].weight, solved[name].tensors)
        write_solutions(file, {name: solved[name] for name in modules})
        training.remove()
        self._replace(hidden, self._outputs(self.block.module, hidden))

    def observe(self, file: Path) -> None:
        """Run the block as it is, and note in an empty file that it was run."""
        self._replace(self.state.hidden, self._outputs(self.block.module, self.state.hidden))
        if self.state.processes.first:
            write_solutions(file, {})

    def skip(self, file: Path) -> None:
        """Run the original model's hidden states alone; nothing is solved."""
        self._pass_originals()
        if self.state.processes.first:
            write_solutions(file, {})

    def restore(self, restore: Callable[[str, dict[str, Tensor]], Tensor | None], file: Path) -> None:
        """Put the weights of a finished block in place."""
        self._pass_originals()
        for name, tensors in read_solutions(file).items():
            _put(self.modules[name], restore(name, tensors), tensors)
        self._replace(self.state.hidden, self._outputs(self.block.module, self.state.hidden))

    def _pass_originals(self) -> None:
        """Run the original model's hidden states through the block, whose weights are the original ones."""
        if self.state.originals is not None:
            self._replace(self.state.originals, self._outputs(self.block.module, self.state.originals))

    def _stream(self, module: nn.Module, hidden: HiddenStates, parts: list[SolvedTogether]) -> _Stream:
        inside = dict(module.named_modules())
        first = [part.holder or part.groups[0][0].removeprefix(self.block.name + ".") for part in parts]
        passes = BlockPasses(
            lambda number: self.call(module, hidden[number].to(self.state.device)),
            len(hidden),
            [inside[path] for path in first],
            waiting=self._may_wait([group for part in parts for group in part.groups]),
            device=self.state.device,
            fast=self.state.fast,
        )
        return _Stream(module, hidden, passes)

    def _may_wait(self, groups: list[list[str]]) -> bool:
        """Whether the tensors that waiting passes hold (about five hidden states and the widest input of each
        token) fit the limit."""
        hidden = self.state.hidden[0].shape[-1]
        widest = max((weight_of(self.modules[group[0]]).shape[1] for group in groups), default=0)
        tokens = len(self.state.hidden) * self.state.hidden[0].shape[:2].numel()
        streams = 1 if self.state.originals is None else 2
        return bool(tokens * streams * 4 * (5 * hidden + widest) <= self.state.waiting_bytes)

    def _outputs(self, module: nn.Module, hidden: HiddenStates) -> Iterator[Tensor]:
        """The outputs (B, S, D) of the block, batch by batch."""
        for number in range(len(hidden)):
            with bf16_products(self.state.device, self.state.fast):
                output = self.call(module, hidden[number].to(self.state.device))
            yield output

    def _replace(self, hidden: HiddenStates, outputs: Iterator[Tensor]) -> None:
        """Replace every batch's hidden states by the block's output."""
        for number, output in enumerate(outputs):
            if not torch.isfinite(torch.stack(torch.aminmax(output))).all():
                raise NumericsError(
                    f"the output of {self.block.name} is not finite", hint="the model overflows float32"
                )
            hidden[number] = output.float()


def _put(module: Any, weight: Tensor | None, tensors: dict[str, Tensor]) -> None:
    """Give a Linear its new weight (N, K) and its new bias, where there are."""
    if weight is not None:
        weight_of(module).copy_(weight)
    if "bias" in tensors:
        module.bias.copy_(tensors["bias"])


def write_solutions(file: Path, solutions: dict[str, Solution]) -> None:
    """Write the solutions of one block."""
    tensors = {
        f"{name}/{short}": tensor.clone(memory_format=torch.contiguous_format)
        for name, solution in solutions.items()
        for short, tensor in solution.tensors.items()
    }
    reports = [{"name": name, **solution.report} for name, solution in solutions.items()]
    atomic.save_tensors(file, tensors, {"reports": json.dumps(reports)})


def read_solutions(file: Path) -> dict[str, dict[str, Tensor]]:
    """The solution tensors of a block file, by module."""
    tensors: dict[str, dict[str, Tensor]] = {}
    with safe_open(file, framework="pt") as opened:
        for key in opened.keys():  # noqa: SIM118  (not a dict)
            name, _, short = key.rpartition("/")
            tensors.setdefault(name, {})[short] = opened.get_tensor(key)
    return tensors


def read_reports(file: Path) -> list[dict[str, Any]]:
    """The reports of a block file."""
    with safe_open(file, framework="pt") as opened:
        reports: list[dict[str, Any]] = json.loads(opened.metadata()["reports"])
    return reports
