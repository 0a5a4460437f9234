"""Export to EXL2: bits where they matter inside every Linear, rounded by GPTQ with the scales in the loop.

    measure   the output error of each Linear under patterns of some 2 to 8 bits     (one sweep)
    choose    a pattern for each Linear under the average asked for                  (exact)
    round     every Linear under its pattern                                         (one sweep)
    write     codes, float16 for everything else                                     (streamed)

Sweeps, head and writing are those of swept.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attar.checkpoint.atomic import write_config
from attar.checkpoint.open import Checkpoint
from attar.checkpoint.output import StageOutput
from attar.deployment.settings import ExportSettings
from attar.deployment.swept import SweptExport, SweptFolder, linears
from attar.formats import exl2
from attar.formats.exl2 import WEIGHT, decode, layout
from attar.formats.exl2 import refuse as refuse_shape
from attar.progress import Progress
from attar.quantization.hessian import Hessian
from attar.quantization.methods.exl2 import (
    HEADS,
    BitPattern,
    PatternError,
    SortedHessian,
    choose,
    measure,
    order_inputs,
    patterns,
    quantize_layer,
)
from attar.walks.solvers import LinearSolver, Solution


def refuse(source: Checkpoint, settings: ExportSettings) -> None:
    """Raise where a checkpoint cannot become EXL2.

    Raises:
        ModelError: a Linear's inputs are no multiple of 32.
    """
    for shape in linears(source, "EXL2").values():
        refuse_shape(shape)


def write(source: Checkpoint, settings: ExportSettings, output: StageOutput, progress: Progress) -> list[str]:
    """Write the folder; returns what was checked, as sentences."""
    shapes = linears(source, "EXL2")
    export = SweptExport(source, settings, output, progress, shapes)
    errors = export.sweep(_Measuring(shapes, settings.bits), "measure")
    measured = {str(row["name"]): _read(row, shapes) for row in errors.reports}
    chosen = choose(measured, {name: n * k for name, (n, k) in shapes.items()}, settings.bits)
    chosen_patterns = {name: choice.pattern for name, choice in chosen.items()}
    swept = export.sweep(_Rounding(chosen_patterns), "round")
    head = export.head(
        lambda weight, H: quantize_layer(weight, H, HEADS[settings.head_bits], sweeps=0).tensors
    )
    stored = sum(choice.bits for choice in chosen.values()) / sum(n * k for n, k in shapes.values())
    quantization = exl2.quantization_config(
        round(stored, 4),
        settings.head_bits,
        rows={name: n for name, (n, _) in shapes.items() if n % 32},
        calibration=export.calibration,
    )
    write_config(
        output.folder / "config.json",
        {**source.config, "dtype": "float16", "quantization_config": quantization},
    )
    output.details["bits_per_weight"] = stored
    layouts = {
        name: layout(shapes[name], pattern.sections(shapes[name][1]))
        for name, pattern in chosen_patterns.items()
    }
    return export.write(
        SweptFolder(
            export, layouts, swept, head, WEIGHT, lambda name, tensors: decode(tensors, shapes[name][0])
        )
    )


@dataclass(frozen=True)
class _Measuring(LinearSolver):
    """Solver that reports the error of each pattern; weights stay."""

    shapes: Mapping[str, tuple[int, int]]
    bits: float

    def accumulator(self, names: Sequence[str], inputs: int) -> Hessian:
        """Empty statistics of a group."""
        return Hessian(inputs)

    def solve(self, weights: dict[str, Tensor], accumulator: Hessian) -> dict[str, Solution]:
        """The weights as they are, with reports."""
        H = accumulator.value()
        inputs = order_inputs(H)
        return {
            name: Solution(weight, {}, self._report(weight, H, inputs)) for name, weight in weights.items()
        }

    def _report(self, weight: Tensor, H: Tensor, inputs: SortedHessian) -> dict[str, Any]:
        shape = (weight.shape[0], weight.shape[1])
        near = patterns(shape, self.bits - 1.6, self.bits + 2.2)
        return {
            "measured": [
                [quantized.pattern.parts, quantized.error]
                for quantized in measure(weight, H, near, inputs=inputs)
            ]
        }

    def restore(self, name: str, tensors: dict[str, Tensor]) -> Tensor:
        """Weights of a finished block are those of the checkpoint."""
        raise AssertionError("nothing was stored")


@dataclass(frozen=True)
class _Rounding(LinearSolver):
    """Solver that rounds each Linear under its pattern."""

    chosen: Mapping[str, BitPattern]

    def accumulator(self, names: Sequence[str], inputs: int) -> Hessian:
        """Empty statistics of a group."""
        return Hessian(inputs)

    def solve(self, weights: dict[str, Tensor], accumulator: Hessian) -> dict[str, Solution]:
        """EXL2's tensors of each Linear."""
        H = accumulator.value()
        inputs = order_inputs(H)
        layers = {
            name: quantize_layer(weight, H, self.chosen[name], inputs=inputs)
            for name, weight in weights.items()
        }
        unseen = {"unseen": accumulator.unseen, "tokens": accumulator.tokens}
        return {
            name: Solution(layer.weight, layer.tensors, layer.report | unseen)
            for name, layer in layers.items()
        }

    def restore(self, name: str, tensors: dict[str, Tensor]) -> Tensor:
        """The weight of a finished block."""
        return decode(tensors)


def _read(row: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]]) -> list[PatternError]:
    measured = []
    for parts, error in row["measured"]:
        pattern = BitPattern(tuple((int(bits), int(percent), int(size)) for bits, percent, size in parts))
        measured.append(PatternError(pattern, pattern.stored_bits(shapes[str(row["name"])]), float(error)))
    return measured
