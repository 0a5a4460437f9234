"""Export to EXL2: bits where they matter inside every Linear, rounded by GPTQ with the scales in the loop.

    measure   the output error of each Linear under patterns of some 2 to 8 bits     (one sweep)
    choose    a pattern for each Linear under the average asked for                  (exact)
    round     every Linear under its pattern                                         (one sweep)
    write     codes, float16 for everything else                                     (streamed)

The head is rounded with the mean squares of its inputs in place of a Hessian.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attar.checkpoint.atomic import write_config
from attar.checkpoint.companions import copy_companions
from attar.checkpoint.open import open_checkpoint
from attar.checkpoint.output import StageOutput
from attar.checkpoint.shards import TensorSpec
from attar.data.packing import calibration_batches, row_length
from attar.data.sources import COMPRESSION
from attar.deployment import imatrix
from attar.deployment.settings import ExportSettings
from attar.deployment.verify import check_fits
from attar.errors import ModelError, NumericsError
from attar.formats import exl2
from attar.formats.exl2 import WEIGHT, decode, layout, sections_of
from attar.formats.exl2 import refuse as refuse_shape
from attar.formats.readers import reader
from attar.models.anatomy.discover import discover
from attar.models.loading.device import pick_device
from attar.models.loading.empty import empty_model
from attar.models.loading.load import load_tokenizer
from attar.models.loading.stored import stored_names
from attar.progress import Progress
from attar.quantization.gates import checked_layers
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
from attar.walks.positions import PositionWeights
from attar.walks.settings import FIRST_WEIGHT
from attar.walks.solvers import LinearSolver, Solution
from attar.walks.stream import stream
from attar.walks.sweep import SweepOptions, SweepResult, sweep_linears

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint

FLOATS = ("F64", "F32", "BF16", "F16")
HEAD = "lm_head"


def refuse(source: Checkpoint, settings: ExportSettings) -> None:
    """Raise where a checkpoint cannot become EXL2.

    Raises:
        ModelError: a Linear's inputs are no multiple of 32.
    """
    for shape in _linears(source).values():
        refuse_shape(shape)


def _linears(source: Checkpoint) -> dict[str, tuple[int, int]]:
    """(N, K) of every Linear of the blocks by module name."""
    model = empty_model(source.config)
    shapes = {}
    for block in discover(model).blocks:
        for name in block.linears:
            module = model.get_submodule(name)
            if not isinstance(module, torch.nn.Linear):
                raise ModelError(f"EXL2 has no transposed Linears ({source.config['model_type']})")
            shapes[name] = (module.out_features, module.in_features)
    return shapes


def write(source: Checkpoint, settings: ExportSettings, output: StageOutput, progress: Progress) -> list[str]:
    """Write the folder; returns what was checked, as sentences."""
    shapes = _linears(source)
    batches = calibration_batches(
        load_tokenizer(source),
        settings.data,
        samples=settings.samples,
        sequence_length=row_length(settings.sequence_length, source.config),
        batch_size=settings.batch_size,
        seed=settings.seed,
        bos=settings.bos,
        split=COMPRESSION,
    )

    def walk(solver: Any, name: str) -> SweepResult:
        return sweep_linears(
            source,
            batches,
            solver,
            SweepOptions(
                work=output.shared / name,
                processes=output.processes,
                select=shapes.__contains__,
                precision=settings.precision,
                positions=PositionWeights(FIRST_WEIGHT),
                device=pick_device(settings.device),
                progress=progress,
                what=name,
            ),
        )

    errors = walk(_Measuring(shapes, settings.bits), "measure")
    measured = {str(row["name"]): _read(row, shapes) for row in errors.reports}
    chosen = choose(measured, {name: n * k for name, (n, k) in shapes.items()}, settings.bits)
    chosen_patterns = {name: choice.pattern for name, choice in chosen.items()}
    swept = walk(_Rounding(chosen_patterns), "round")
    head = _rounded_head(source, batches, settings, output, progress)
    conversion = _EXL2Conversion(
        source, shapes, {name: choice.pattern for name, choice in chosen.items()}, swept, head
    )
    stored = sum(choice.bits for choice in chosen.values()) / sum(n * k for n, k in shapes.values())
    quantization = exl2.quantization_config(
        round(stored, 4),
        settings.head_bits,
        rows={name: n for name, (n, _) in shapes.items() if n % 32},
        calibration={
            "rows": settings.samples,
            "length": settings.sequence_length,
            "dataset": settings.data,
        },
    )
    write_config(
        output.folder / "config.json",
        {**source.config, "dtype": "float16", "quantization_config": quantization},
    )
    stream(
        source,
        conversion.slots,
        conversion.tensors,
        output.folder,
        work=output.shared / "shards",
        processes=output.processes,
        progress=progress,
        what="export exl2",
    )
    output.exit_unless_rank0()
    copy_companions(source.path, output.folder)
    output.details["layers"] = list(swept.reports)
    output.details["notes"] = checked_layers(swept.reports, "exl2")
    output.details["bits_per_weight"] = stored
    return conversion.verify(open_checkpoint(output.folder), progress)


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


def _rounded_head(
    source: Checkpoint,
    batches: Sequence[Tensor],
    settings: ExportSettings,
    output: StageOutput,
    progress: Progress,
) -> dict[str, Tensor] | None:
    """The tensors of the head; None where it stays dense."""
    if settings.head_bits not in HEADS:
        return None
    sums = imatrix.compute(
        source,
        batches,
        work=output.shared / "head",
        processes=output.processes,
        precision=settings.precision,
        device=pick_device(settings.device),
        progress=progress,
    )
    return _head(source, sums, HEADS[settings.head_bits])


def _head(
    source: Checkpoint, sums: Mapping[str, tuple[Tensor, float]], pattern: BitPattern
) -> dict[str, Tensor]:
    """The tensors of the head."""
    stored = _head_name(source)
    weight = source.load(stored).float()
    squares = sums[stored][0] / max(float(sums[stored][1]), 1.0)
    return quantize_layer(weight, torch.diag(2.0 * squares), pattern, sweeps=0).tensors


def _head_name(source: Checkpoint) -> str:
    """The stored weight of the head: the embedding where they are one."""
    model = empty_model(source.config)
    anatomy = discover(model)
    names = stored_names(model, source)
    return names[f"{anatomy.embedding if anatomy.tied else anatomy.head}.weight"]


@dataclass
class _EXL2Conversion:
    """The output tensors of each stored tensor.

    Attributes:
        shapes: (N, K) of each Linear by module name.
        chosen: pattern of each Linear.
        swept: tensors of each Linear.
        head: tensors of the head; None where it stays dense.
    """

    source: Checkpoint
    shapes: Mapping[str, tuple[int, int]]
    chosen: Mapping[str, BitPattern]
    swept: SweepResult
    head: Mapping[str, Tensor] | None

    def __post_init__(self) -> None:
        self.cached: tuple[int, dict[str, dict[str, Tensor]]] = (-1, {})
        names = stored_names(empty_model(self.source.config), self.source)
        self.modules = {names[f"{module}.weight"]: module for module in self.shapes}
        self.head_stored = _head_name(self.source) if self.head is not None else ""

    def slots(self, info: Any) -> list[TensorSpec]:
        """Names, types and shapes of the output of a stored tensor."""
        if info.name in self.modules:
            module, base = self.modules[info.name], info.name.removesuffix(".weight")
            parts = layout(self.shapes[module], self.chosen[module].sections(self.shapes[module][1]))
            return [TensorSpec(f"{base}.{leaf}", kind, shape) for leaf, (kind, shape) in parts.items()]
        kept = TensorSpec(info.name, "F16" if info.dtype in FLOATS else info.dtype, info.shape)
        if info.name != self.head_stored:
            return [kept]
        parts = layout(info.shape, sections_of(self.head or {}))
        heads = [TensorSpec(f"{HEAD}.{leaf}", kind, shape) for leaf, (kind, shape) in parts.items()]
        return heads if info.name == f"{HEAD}.weight" else [kept, *heads]

    def tensors(self, name: str, load: Any) -> dict[str, Tensor]:
        """The output of a stored tensor, see :meth:`slots`."""
        if name in self.modules:
            module, base = self.modules[name], name.removesuffix(".weight")
            return {f"{base}.{leaf}": value for leaf, value in self._rounded(module).items()}
        heads = {f"{HEAD}.{leaf}": value for leaf, value in (self.head or {}).items()}
        if name == f"{HEAD}.weight" and name == self.head_stored:
            return heads
        tensor = load()
        kept = tensor.half() if tensor.is_floating_point() else tensor
        check_fits(name, kept)
        return {name: kept, **(heads if name == self.head_stored else {})}

    def _rounded(self, module: str) -> dict[str, Tensor]:
        """Tensors of a Linear from the sweep; one block is in memory at a time."""
        number = self.swept.block_of[module]
        if self.cached[0] != number:
            self.cached = (number, self.swept.tensors(number))
        return self.cached[1][module]

    def verify(self, written: Checkpoint, progress: Progress) -> list[str]:
        """Read the file back and compare it with the decoded tensors of the sweep."""
        read = reader(written)
        with progress.task("verify", total=len(self.modules)) as task:
            for stored, module in self.modules.items():
                base = stored.removesuffix(".weight")
                wanted, got = (
                    decode(self._rounded(module), self.shapes[module][0]),
                    read.decode(f"{base}.{WEIGHT}"),
                )
                read.check(f"{base}.{WEIGHT}")
                if got is None or not torch.equal(got, wanted):
                    raise NumericsError(f"{stored} reads back differently", hint="run it again")
                task.advance()
        return [f"{len(self.modules)} Linears read back equal", "scales finite and not zero"]
