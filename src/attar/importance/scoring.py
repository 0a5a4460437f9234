"""What a criterion is given: the model, the weights of its units, the text; and sums over calibration batches
that survive a kill.

A score is a sum over batches of a small tensor, or made of one. The sum is kept in the work folder with the
number of its batches: a killed run adds the rest and ends in the same bytes. Several processes each run a
part of the batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from attar.checkpoint import atomic
from attar.checkpoint.processes import SINGLE_PROCESS, Processes
from attar.errors import NumericsError
from attar.models.anatomy.parts import Anatomy
from attar.models.anatomy.unit_weights import UnitWeights
from attar.models.surgery.masking import stream_norms
from attar.progress import SILENT, Progress
from attar.walks.distributed import own_batches
from attar.walks.objectives import Loss
from attar.walks.passes import StopForward

SAVE_SECONDS = 20.0  # a kill loses at most this much


@dataclass(frozen=True)
class UnitScoring:
    """One scoring of all units.

    Attributes:
        model: dense, float32, in evaluation mode, on its device; what is removed already is masked.
        weights: of the units of each layer; empty for hidden channels and for layers.
        batches: int64 (B, S), none padded.
        loss: that the model was trained with.
        work: folder for what survives a kill, which the processes share.
        processes: each runs a part of the batches; all get the sums of all.
        stay: how many units of a layer (or channels, or layers) will be kept.
        precision: of the passes: ``bf16`` or ``fp32``.
    """

    model: Any
    anatomy: Anatomy
    weights: Sequence[UnitWeights]
    batches: Sequence[Tensor]
    loss: Loss
    work: Path
    processes: Processes = SINGLE_PROCESS
    stay: int = 1
    precision: str = "fp32"
    progress: Progress = SILENT
    what: str = "importance"

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(iter(self.model.parameters())).device

    @property
    def sequences(self) -> int:
        """Rows of all batches."""
        return sum(len(batch) for batch in self.batches)

    def total(self, name: str, measure: Callable[[Tensor], Tensor]) -> Tensor:
        """The sum of ``measure(batch)`` over all batches, float64 on the CPU.

        Args:
            name: of the sum's file in the work folder.

        Raises:
            NumericsError: it is not finite.
        """
        rank, count = self.processes.rank, self.processes.count
        file = self.work / f"{name}-{rank}-of-{count}.safetensors"
        batches = own_batches(self.batches, self.processes)
        done, total = _read(file)
        saved = time.monotonic()
        with self.progress.task(self.what, total=len(batches), done=done) as task:
            for number in range(done, len(batches)):
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
                    value = measure(batches[number].to(self.device)).double().cpu()
                total = value if total is None else total + value
                last = number + 1 == len(batches)
                if last or time.monotonic() - saved > SAVE_SECONDS:
                    saved = time.monotonic()
                    self.work.mkdir(parents=True, exist_ok=True)
                    atomic.save_tensors(file, {"total": total}, {"batches": str(number + 1)})
                task.advance()
        assert total is not None, "there are batches"
        total = self.processes.total(total)
        if not torch.isfinite(total).all():
            raise NumericsError(
                f"the scores of {self.what} are not finite", hint="check the model for NaN: attar inspect"
            )
        return total

    def forward(self, batch: Tensor) -> None:
        """Run the model for what hooks see; :class:`StopForward` of a hook ends the pass."""
        options = {"use_cache": False} if self.anatomy.causal else {}
        try:
            with torch.no_grad():
                self.model(input_ids=batch, **options)
        except StopForward:
            pass

    def inputs(self, batch: Tensor, reduce: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """``reduce(x)`` of the input x (B, S, F) of each layer's consumer, in one pass."""
        modules = [layer.consumer for layer in self.weights]
        with _observed(modules, lambda args, _: args[0], reduce, len(batch)) as values:
            self.forward(batch)
        return [values[number] for number in range(len(modules))]

    def outputs(
        self, batch: Tensor, modules: Sequence[nn.Module], reduce: Callable[[Tensor], Tensor]
    ) -> dict[int, Tensor]:
        """``reduce(y)`` of the output y (B, S, D) of the modules that run, by their numbers."""
        with _observed(modules, _hidden_of, reduce, len(batch)) as values:
            self.forward(batch)
        return values

    def states(self, batch: Tensor) -> list[Tensor]:
        """The hidden states (B, S, D) before every block and after the last, float32."""
        blocks = [block.module for block in self.anatomy.blocks]
        states: list[Tensor] = []

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states.append((args[0] if args else kwargs["hidden_states"]).float())

        hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
        try:
            last = self.outputs(batch, blocks[-1:], lambda y: y)
        finally:
            for hook in hooks:
                hook.remove()
        return [*states, last[0].reshape(states[0].shape)]

    def norms(self) -> list[nn.Module]:
        """The norms over the residual stream."""
        return [self.model.get_submodule(name) for name in stream_norms(self.model, self.anatomy)]

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """No parameter asks for a gradient, inside the context."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)


def no_loss(model: Any, tokens: Tensor) -> Tensor:
    """For criteria that do not ask for one."""
    raise AssertionError("the criterion has no loss")


def _hidden_of(_: tuple[Any, ...], output: Any) -> Tensor:
    """The hidden states that a module returns, some with more in a tuple."""
    hidden: Tensor = output if isinstance(output, Tensor) else output[0]
    return hidden


def _read(file: Path) -> tuple[int, Tensor | None]:
    """The number of batches in a sum's file, and the sum."""
    if not file.exists():
        return 0, None
    with safe_open(file, framework="pt") as opened:
        return int(opened.metadata()["batches"]), opened.get_tensor("total").clone()


@contextmanager
def _observed(
    modules: Sequence[nn.Module],
    pick: Callable[[tuple[Any, ...], Any], Tensor],
    reduce: Callable[[Tensor], Tensor],
    sequences: int,
) -> Iterator[dict[int, Tensor]]:
    """Reduced inputs or outputs of modules by number; the pass stops when it has all."""
    values: dict[int, Tensor] = {}

    def hook(number: int) -> Callable[..., None]:
        def observe(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            x = pick(args, output).detach()
            values[number] = reduce(x.reshape(sequences, -1, x.shape[-1]).float())  # some families flatten
            if len(values) == len(modules):
                raise StopForward

        return observe

    handles = [module.register_forward_hook(hook(number)) for number, module in enumerate(modules)]
    try:
        yield values
    finally:
        for handle in handles:
            handle.remove()
