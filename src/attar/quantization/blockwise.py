"""AutoRound as a block solver of the sweep walk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attar.models.anatomy.parts import weight_of
from attar.models.loading.device import resolve
from attar.quantization.grids import Grid, QuantizedTensor
from attar.quantization.methods.autoround import autoround
from attar.walks.solvers import BlockView, LinearSolver, Solution

StartCodes = Callable[[BlockView, Mapping[str, Grid]], Mapping[str, QuantizedTensor]]
"""``start(view, grids)``: initial codes by name of a block's Linears; a Linear that is left out starts
from its nearest codes. See :func:`solved_start`."""


@dataclass(frozen=True)
class AutoRoundSolver:
    """A block solver.

    Attributes:
        grids: the number format of each Linear, by module name.
        iterations: steps for each block.
        batch: sequences in a step.
        learning_rate: of the first step; None: 1 / iterations.
        clip: learn factors on each tile's range too.
        update: "sign", or "adam".
        precision: arithmetic while learning: bf16, fp32, or auto (bf16 where it is faster).
        start: see :data:`StartCodes`; None: nearest codes everywhere.
        masks: bool (N, K) by module name; False: the weight is zero and stays zero.
    """

    grids: Mapping[str, Grid]
    iterations: int = 200
    batch: int = 8
    learning_rate: float | None = None
    clip: bool = True
    update: str = "sign"
    precision: str = "auto"
    seed: int = 0
    start: StartCodes | None = None
    masks: Mapping[str, Tensor] | None = None

    def solve_block(self, view: BlockView) -> dict[str, Solution]:
        """Learn the rounding of the view's Linears; the module is left as it was."""
        device = next(view.module.parameters()).device
        fast = resolve(self.precision, device) == "bf16"
        learned = autoround(
            view,
            self.grids,
            iterations=self.iterations,
            batch=self.batch,
            learning_rate=self.learning_rate,
            clip=self.clip,
            update=self.update,
            fast=fast,
            seed=self.seed,
            starts=None if self.start is None else self.start(view, self.grids),
            masks=self.masks,
        )
        report = {"loss_first": learned.first, "loss_best": learned.best}
        return {
            name: Solution(quantized.dequantize(), quantized.tensors(), dict(report))
            for name, quantized in learned.quantized.items()
        }

    def restore(self, name: str, tensors: dict[str, Tensor]) -> Tensor:
        """The weight (N, K) of stored codes."""
        return QuantizedTensor.from_tensors(self.grids[name], tensors).dequantize()


def solved_start(solver: LinearSolver) -> StartCodes:
    """The codes of a solver for one Linear at a time, for :class:`AutoRoundSolver`'s ``start``.

    The statistics are of the original block's inputs after the quantized prefix, all from one pass: how the
    Linears of one block affect each other is left to the training.
    """

    def start(view: BlockView, grids: Mapping[str, Grid]) -> dict[str, QuantizedTensor]:
        weights = {name: weight_of(view.modules[name]).detach() for name in view.names}
        seen = {name: solver.accumulator([name], weight.shape[1]) for name, weight in weights.items()}

        def add(name: str, x: Tensor) -> None:
            in_rows = x.dim() > 2  # the tokens of an expert all count once
            seen[name].add(x, importance=view.importance(x, name) if in_rows else None)

        hooks = [
            view.modules[name].register_forward_pre_hook(lambda _, args, name=name: add(name, args[0]))
            for name in view.names
        ]
        try:
            with torch.no_grad():
                for number in range(view.count):
                    view(view.inputs(number), number)
        finally:
            for hook in hooks:
                hook.remove()
        solved = {
            name: solver.solve({name: weight}, seen[name])[name].tensors
            for name, weight in weights.items()
            if seen[name].tokens
        }
        return {name: QuantizedTensor.from_tensors(grids[name], tensors) for name, tensors in solved.items()}

    return start
