"""Export to EXL3: every Linear on a trellis of whole bits, rotated, its errors corrected in later inputs.

    round     every Linear                                     (one sweep)
    write     trellises, float16 for everything else           (streamed)

Widths that 128 does not divide are filled up with zeros, as ExLlamaV3 does; what that costs is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attar.checkpoint.atomic import write_config, write_json
from attar.checkpoint.normal_form import with_tie
from attar.checkpoint.open import Checkpoint
from attar.checkpoint.output import StageOutput
from attar.checkpoint.tensors import tensor_bytes
from attar.deployment.settings import ExportSettings
from attar.deployment.swept import HEAD, SweptExport, SweptFolder, linears
from attar.formats import exl3
from attar.formats.exl3 import BLOCK, TRELLIS, layout
from attar.progress import Progress
from attar.quantization.hessian import Hessian
from attar.quantization.methods.exl3 import quantize_layer
from attar.walks.solvers import LinearSolver, Solution

STORAGE = "quantization_config.json"
"""What ExLlamaV3 writes beside config.json, and GPTQModel asks for."""


def refuse(source: Checkpoint, settings: ExportSettings) -> None:
    """Raise where a checkpoint cannot become EXL3.

    Raises:
        ModelError: its Linears are transposed.
    """
    linears(source, "EXL3")


def write(source: Checkpoint, settings: ExportSettings, output: StageOutput, progress: Progress) -> list[str]:
    """Write the folder; returns what was checked, as sentences."""
    shapes, bits = linears(source, "EXL3"), int(settings.bits)
    export = SweptExport(source, settings, output, progress, shapes)
    swept = export.sweep(_TrellisRounding(shapes, bits, settings.seed), "round")
    head = export.head(
        lambda weight, H: quantize_layer(weight, H, settings.head_bits, seed=settings.seed).tensors
    )
    layouts = {name: layout(shape, bits) for name, shape in shapes.items()}
    folder = SweptFolder(
        export, layouts, swept, head, TRELLIS, lambda name, tensors: exl3.decode(tensors, shapes[name])
    )
    quantization = exl3.quantization_config(bits, settings.head_bits, export.calibration)
    config = source.config if head is None else with_tie(source.config, False)
    write_config(
        output.folder / "config.json", {**config, "dtype": "float16", "quantization_config": quantization}
    )
    bases = {stored.removesuffix(".weight"): layouts[module] for stored, module in folder.modules.items()}
    storage = {base: exl3.storage(base, parts) for base, parts in bases.items()}
    if head is not None:
        weight = source.tensors[export.head_name].shape
        parts = layout((weight[0], weight[1]), settings.head_bits)
        storage[HEAD] = exl3.storage(HEAD, parts)
    write_json(output.folder / STORAGE, {**quantization, "tensor_storage": storage})
    size = sum(tensor_bytes(*part) for parts in layouts.values() for part in parts.values())
    output.details["bits_per_weight"] = 8 * size / sum(n * k for n, k in shapes.values())
    checks = export.write(folder)
    output.details["notes"] += _filled(shapes)
    return checks


def _filled(shapes: dict[str, tuple[int, int]]) -> list[str]:
    """A note on Linears that were filled up."""
    odd = [name for name, shape in shapes.items() if shape[0] % BLOCK or shape[1] % BLOCK]
    if not odd:
        return []
    size = sum((n + -n % BLOCK) * (k + -k % BLOCK) for n, k in shapes.values())
    more = size / sum(n * k for n, k in shapes.values()) - 1
    first = f"{odd[0]}, {shapes[odd[0]][0]} x {shapes[odd[0]][1]}"
    return [
        f"EXL3 has multiples of {BLOCK}: {first}, and {len(odd) - 1} more Linears are filled up with zeros, "
        f"{more:.0%} more weights; ExLlamaV3 loads them, GPTQModel does not"
    ]


@dataclass(frozen=True)
class _TrellisRounding(LinearSolver):
    """Solver that rounds each Linear."""

    shapes: dict[str, tuple[int, int]]
    bits: int
    seed: int

    def accumulator(self, names: Sequence[str], inputs: int) -> Hessian:
        """Empty statistics of a group."""
        return Hessian(inputs)

    def solve(self, weights: dict[str, Tensor], accumulator: Any) -> dict[str, Solution]:
        """EXL3's tensors of each Linear."""
        H = accumulator.value()
        seen = {"unseen": accumulator.unseen, "tokens": accumulator.tokens}
        layers = {
            name: quantize_layer(weight, H, self.bits, seed=self.seed) for name, weight in weights.items()
        }
        return {
            name: Solution(layer.weight, layer.tensors, layer.report | seen) for name, layer in layers.items()
        }

    def restore(self, name: str, tensors: dict[str, Tensor]) -> Tensor:
        """The weight of a finished block."""
        return exl3.decode(tensors, self.shapes[name])
