"""What EXL2 and EXL3 share: Linears rounded in sweeps over the calibration text, their tensors and those of
the head written beside everything else in float16, read back and compared.

The head is rounded with the mean squares of its inputs in place of a Hessian. A model whose embedding is the
head gets a head of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.companions import copy_companions
from attar.checkpoint.open import Checkpoint, open_checkpoint
from attar.checkpoint.output import StageOutput
from attar.checkpoint.shards import TensorSpec
from attar.checkpoint.tensors import stored_dtype
from attar.data.sources import COMPRESSION
from attar.deployment import imatrix
from attar.deployment.settings import ExportSettings
from attar.deployment.verify import check_fits
from attar.errors import ModelError, NumericsError
from attar.formats.coded import WeightLayout
from attar.formats.readers import reader
from attar.models.anatomy.discover import discover
from attar.models.loading.calibration import calibration_text
from attar.models.loading.device import pick_device
from attar.models.loading.empty import empty_model
from attar.models.loading.stored import stored_names
from attar.progress import Progress
from attar.quantization.gates import checked_layers
from attar.walks.positions import PositionWeights
from attar.walks.settings import FIRST_WEIGHT
from attar.walks.solvers import LinearSolver
from attar.walks.stream import stream
from attar.walks.sweep import SweepOptions, SweepResult, sweep_linears

FLOATS = ("F64", "F32", "BF16", "F16")
HEAD = "lm_head"


def linears(source: Checkpoint, format: str) -> dict[str, tuple[int, int]]:
    """(N, K) of every Linear of the blocks by module name.

    Raises:
        ModelError: they are transposed, as GPT-2's.
    """
    model = empty_model(source.config)
    shapes = {}
    for block in discover(model).blocks:
        for name in block.linears:
            module = model.get_submodule(name)
            if not isinstance(module, torch.nn.Linear):
                raise ModelError(f"{format} has no transposed Linears ({source.config['model_type']})")
            shapes[name] = (module.out_features, module.in_features)
    return shapes


@dataclass(frozen=True)
class SweptExport:
    """An export whose Linears are rounded in sweeps.

    Attributes:
        shapes: (N, K) of each Linear by module name.
    """

    source: Checkpoint
    settings: ExportSettings
    output: StageOutput
    progress: Progress
    shapes: Mapping[str, tuple[int, int]]

    @cached_property
    def batches(self) -> Sequence[Tensor]:
        """The calibration text."""
        return calibration_text(self.source, self.settings, split=COMPRESSION)

    @property
    def calibration(self) -> dict[str, Any]:
        """The calibration text in a ``quantization_config``."""
        settings = self.settings
        return {"rows": settings.samples, "length": settings.sequence_length, "dataset": settings.data}

    def sweep(self, solver: LinearSolver, name: str) -> SweepResult:
        """Run a solver over all Linears."""
        return sweep_linears(
            self.source,
            self.batches,
            solver,
            SweepOptions(
                work=self.output.shared / name,
                processes=self.output.processes,
                select=self.shapes.__contains__,
                precision=self.settings.precision,
                positions=PositionWeights(FIRST_WEIGHT),
                device=pick_device(self.settings.device),
                progress=self.progress,
                what=name,
            ),
        )

    def head(self, quantize: Callable[[Tensor, Tensor], dict[str, Tensor]]) -> dict[str, Tensor] | None:
        """The tensors of the head, from its weight and a diagonal Hessian; None where it stays dense."""
        if self.settings.head_bits == 16:
            return None
        sums = imatrix.compute(
            self.source,
            self.batches,
            work=self.output.shared / "head",
            processes=self.output.processes,
            precision=self.settings.precision,
            device=pick_device(self.settings.device),
            progress=self.progress,
        )
        stored = self.head_name
        squares = sums[stored][0] / max(float(sums[stored][1]), 1.0)
        return quantize(self.source.load(stored).float(), torch.diag(2.0 * squares))

    @cached_property
    def head_name(self) -> str:
        """The stored weight of the head: the embedding where they are one."""
        model = empty_model(self.source.config)
        anatomy = discover(model)
        names = stored_names(model, self.source)
        return names[f"{anatomy.embedding if anatomy.tied else anatomy.head}.weight"]

    def write(self, folder: SweptFolder) -> list[str]:
        """Write the folder, its config aside; returns what was checked, as sentences."""
        output, method = self.output, self.settings.format
        stream(
            self.source,
            folder.slots,
            folder.tensors,
            output.folder,
            work=output.shared / "shards",
            processes=output.processes,
            progress=self.progress,
            what=f"export {method}",
        )
        output.exit_unless_rank0()
        copy_companions(self.source.path, output.folder)
        output.details["layers"] = list(folder.swept.reports)
        output.details["notes"] = checked_layers(folder.swept.reports, method)
        return folder.verify(open_checkpoint(output.folder), self.progress)


@dataclass
class SweptFolder:
    """The output tensors of each stored tensor.

    Attributes:
        layouts: of each Linear by module name.
        swept: tensors of each Linear.
        head: tensors of the head; None where it stays dense.
        codes: the last part of the name of a weight's codes.
        decode: the weight of a Linear from its module name and tensors, as the reader decodes it.
    """

    export: SweptExport
    layouts: Mapping[str, WeightLayout]
    swept: SweepResult
    head: Mapping[str, Tensor] | None
    codes: str
    decode: Callable[[str, Mapping[str, Tensor]], Tensor]

    def __post_init__(self) -> None:
        self.cached: tuple[int, dict[str, dict[str, Tensor]]] = (-1, {})
        source = self.export.source
        names = stored_names(empty_model(source.config), source)
        self.modules = {names[f"{module}.weight"]: module for module in self.layouts}
        self.head_stored = self.export.head_name if self.head is not None else ""

    def slots(self, info: Any) -> list[TensorSpec]:
        """Names, types and shapes of the output of a stored tensor."""
        if info.name in self.modules:
            base, parts = info.name.removesuffix(".weight"), self.layouts[self.modules[info.name]]
            return [TensorSpec(f"{base}.{leaf}", kind, shape) for leaf, (kind, shape) in parts.items()]
        kept = TensorSpec(info.name, "F16" if info.dtype in FLOATS else info.dtype, info.shape)
        if info.name != self.head_stored:
            return [kept]
        heads = [
            TensorSpec(f"{HEAD}.{leaf}", stored_dtype(value.dtype), tuple(value.shape))
            for leaf, value in (self.head or {}).items()
        ]
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
                codes = f"{stored.removesuffix('.weight')}.{self.codes}"
                wanted, got = self.decode(module, self._rounded(module)), read.decode(codes)
                read.check(codes)
                if got is None or not torch.equal(got, wanted):
                    raise NumericsError(f"{stored} reads back differently", hint="run it again")
                task.advance()
        return [f"{len(self.modules)} Linears read back equal", "scales finite and not zero"]
