"""Codes for every quantized tensor of a GGUF file: carried over, rounded by a method of attar.quantization,
or to nearest; behind either, the float16 numbers of the blocks, norms and biases may be tuned.

Rows are reordered last (llama.cpp's order of heads): grids and roundings treat all rows alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attar.checkpoint.open import Checkpoint
from attar.deployment.gguf_types import FLOATS, TensorTypes, stored_codes
from attar.deployment.importance import InputImportance
from attar.deployment.settings import ExportSettings
from attar.errors import NumericsError
from attar.formats.gguf.codes import e4m3_of, to_blocks
from attar.formats.gguf.imatrix import ImportanceEntry
from attar.formats.gguf.reader import GGUFReader
from attar.formats.readers import reader
from attar.formats.rules import WeightRule
from attar.kernels.threads import one_thread
from attar.progress import Progress
from attar.quantization.grids import (
    GGML,
    GGMLGrid,
    Grid,
    MXFP4Grid,
    NVFP4Grid,
    QuantizedTensor,
    TileParameters,
)
from attar.quantization.grids.ggml_search import HALF_LARGEST, HALF_SMALLEST
from attar.quantization.hessian import all_finite
from attar.quantization.schemes import QuantizationScheme
from attar.quantization.settings import QuantizeSettings, quantize_settings

if TYPE_CHECKING:
    from attar.checkpoint.processes import Processes
    from attar.deployment.imatrix import Sums
    from attar.quantization.plan import QuantizationPlan
    from attar.quantization.quantization_method import RoundedModel
    from attar.walks.offloaded_model import HiddenStates, OffloadedModel

LOST = 0.25  # share of a tensor's squared weight that it may lose where a scale is at float16's end


@dataclass(frozen=True)
class GGUFBlocks:
    """A tensor as codes, in the rows' order of the file.

    Attributes:
        quantized: codes (N, K) and what decodes them.
    """

    quantized: QuantizedTensor

    @property
    def codes(self) -> Tensor:
        """(N, K)."""
        return self.quantized.codes

    @property
    def stored(self) -> Mapping[str, Tensor]:
        """What the file holds besides the codes."""
        parameters = self.quantized.parameters
        if isinstance(self.quantized.grid, MXFP4Grid):
            exponent = torch.frexp(parameters.scale).exponent.to(torch.int16) - 1 + 127
            return {"exponent": exponent.to(torch.uint8)}
        if isinstance(self.quantized.grid, NVFP4Grid):
            return {"e4m3": e4m3_of(parameters.scale, parameters.stored["global_scale"])}
        return parameters.stored

    @property
    def whole_scale(self) -> Tensor | None:
        """NVFP4: what all weights are multiplied with, float32 (1,)."""
        above = self.quantized.parameters.stored.get("global_scale")
        return None if above is None else 1.0 / above


@dataclass
class GGUFCodes:
    """The codes of each tensor, computed when asked for.

    Attributes:
        make: ``make(placement, type)``.
        reports: one row a layer, complete after the last tensor.
        norms: tuned norms and biases, float32, by stored name.
        tuning: what the card says of the tuning; empty where there was none.
    """

    make: Callable[[Any, str], QuantizedTensor]
    reports: Callable[[], list[dict[str, Any]]]
    norms: Mapping[str, Tensor] = field(default_factory=dict)
    tuning: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, placement: Any, kind: str) -> GGUFBlocks:
        return GGUFBlocks(self.make(placement, kind))


def grid_of(kind: str) -> Grid:
    """The grid of a type."""
    if kind in ("MXFP4", "NVFP4"):
        return MXFP4Grid() if kind == "MXFP4" else NVFP4Grid()
    return GGML[kind]


def quantized_codes(
    source: Checkpoint,
    view: Any,
    placed: Sequence[Any],
    kinds: TensorTypes,
    settings: ExportSettings,
    importance: InputImportance,
    work: Path,
    processes: Processes,
    progress: Progress,
) -> GGUFCodes:
    """Codes for every placement whose type has blocks.

    Args:
        source: the checkpoint; ``view`` decodes it.
        placed: of the architecture.
        kinds: a type for each placement.
        importance: of the inputs, for nearest rounding.
        work: folder of the finished parts of a sweep, which the processes share.
    """
    maker = _Maker(source, view, kinds, importance)
    plan = None
    if settings.rounding != "nearest" or settings.most_steps:
        plan = rounding_plan(view, placed, kinds)
    if plan is None or not plan.sites:
        return GGUFCodes(maker, list)
    from attar.models.loading.single_experts import decoded_view
    from attar.quantization.effort import with_effort
    from attar.quantization.quantization_method import RoundedModel, RoundingTask
    from attar.quantization.rounding import METHODS
    from attar.quantization.tuning import tuned

    dense, head = decoded_view(source), HeadImportance()
    quantization = with_effort(_quantize_settings(settings), plan, dense, progress)
    after_blocks = None if importance.entries else head
    task = RoundingTask(dense, plan, quantization, work / "round", progress, after_blocks, processes)
    if settings.rounding == "nearest":
        rounded = RoundedModel(_NearestCodes(maker, plan, placed), list)
    else:
        rounded = METHODS[settings.rounding].walk(task)
        importance = head.added(importance, placed)
    if quantization.tuning.tune:
        rounded = tuned(task, rounded)
    maker = _Maker(source, view, kinds, importance, rounded, plan)
    return GGUFCodes(maker, rounded.reports, rounded.norms, rounded.tuning)


class HeadImportance:
    """Importance of the head's inputs, collected at the end of the sweep that rounds the blocks: the head has
    inputs and is rounded to nearest."""

    def __init__(self) -> None:
        self.sums: Sums = {}

    def __call__(
        self, offloaded: OffloadedModel, batches: Sequence[Tensor], hidden: HiddenStates, processes: Processes
    ) -> None:
        """See :data:`attar.walks.sweep.AfterBlocks`."""
        from attar.deployment.imatrix import head_sums

        self.sums = head_sums(offloaded, batches, hidden, processes)

    def added(self, importance: InputImportance, placed: Sequence[Any]) -> InputImportance:
        """The importance with the head's."""
        entries = {
            placement.gguf: ImportanceEntry(*self.sums[placement.stored])
            for placement in placed
            if placement.stored in self.sums
        }
        return replace(importance, entries={**importance.entries, **entries})


def rounding_plan(view: Any, placed: Sequence[Any], kinds: TensorTypes) -> QuantizationPlan:
    """The Linears of the blocks as sites on the grids of their types."""
    from attar.models.anatomy.discover import discover
    from attar.models.loading.empty import empty_model
    from attar.models.loading.stored import stored_names
    from attar.quantization.plan import LayerPlan, QuantizationPlan

    model = empty_model(view.config, unstacked=True)
    names = stored_names(model, view)
    linears = {names[f"{name}.weight"]: name for block in discover(model).blocks for name in block.linears}
    sites = {}
    for placement in placed:
        kind = kinds.of[placement.gguf]
        if (
            placement.stored in linears
            and placement.part is None
            and not placement.scales
            and placement.columns is None
            and kind not in FLOATS
            and placement.gguf not in kinds.carried
        ):
            module = linears[placement.stored]
            turned = not isinstance(model.get_submodule(module), nn.Linear)
            grid = grid_of(kind)
            scheme = QuantizationScheme(
                kind, WeightRule("ggml", round(grid.bits_per_weight(placement.shape)), "group", 32)
            )
            sites[placement.stored] = LayerPlan(module, placement.shape, turned, grid, scheme, torch.float32)
    return QuantizationPlan(sites, None, None, (), {})


def _quantize_settings(settings: ExportSettings) -> QuantizeSettings:
    return quantize_settings(
        method="rtn" if settings.rounding == "nearest" else settings.rounding,
        effort=settings.effort,
        samples=settings.samples,
        sequence_length=settings.sequence_length,
        batch_size=settings.batch_size,
        data=settings.data,
        bos=settings.bos,
        precision=settings.precision,
        device=settings.device,
        seed=settings.seed,
    )


@dataclass(frozen=True)
class _Maker:
    source: Checkpoint
    view: Any
    kinds: TensorTypes
    importance: InputImportance
    rounded: RoundedModel | None = None
    plan: QuantizationPlan | None = None

    @cached_property
    def packed(self) -> Any:
        """The reader of the source's codes."""
        return reader(self.source.with_mtp)

    def __call__(self, placement: Any, kind: str) -> QuantizedTensor:
        if placement.gguf in self.kinds.carried:
            with one_thread():
                return self._carried(placement, kind)
        if self.rounded and self.plan and placement.stored in self.plan.sites:
            codes = self.rounded.codes(placement.stored, lambda: self.view.load(placement.stored))
            return codes if placement.rows is None else reordered(codes, placement.rows)
        with one_thread():
            value = placement.value  # of what is not stored
            stored = placement.apply(self.view.load(placement.stored)) if value is None else value
            weight = stored.flatten(0, -2)
        return self.nearest(placement, kind, weight)

    def nearest(self, placement: Any, kind: str, weight: Tensor) -> QuantizedTensor:
        """A weight (N, K) rounded to nearest, its scales searched with the importance of its inputs."""
        grid, importance = grid_of(kind), self.importance.vector(placement)
        with one_thread():
            if not all_finite(weight):
                raise NumericsError(
                    f"{placement.stored} holds NaN or infinity", hint="the checkpoint is damaged"
                )
        if isinstance(grid, GGMLGrid):
            quantized = grid.search(weight, importance)
            check_range(str(placement.stored), weight, quantized)
            return quantized
        return grid.quantize(weight, grid.choose(weight, importance=importance))

    def _carried(self, placement: Any, kind: str) -> QuantizedTensor:
        packed, rows = self.packed, placement.rows
        mine = packed.same_blocks(placement) if isinstance(packed, GGUFReader) else None
        if mine is not None:  # its rows are in the file's order already
            rows, (codes, stored) = None, packed.blocks(mine)
            above = torch.tensor([1.0 / packed.whole_scale(packed.placements[mine])])
        else:
            coded = stored_codes(packed, self.view.infos[placement.stored].stored, placement)
            assert coded is not None, "a carried tensor has codes"
            codes, stored = to_blocks(kind, *coded)
            above = coded[0].global_scale
        grid = grid_of(kind)
        if isinstance(grid, MXFP4Grid):
            parameters = TileParameters(torch.exp2(stored["exponent"].float() - 127.0))
        elif isinstance(grid, NVFP4Grid):
            local = stored["e4m3"].view(torch.float8_e4m3fn).float()
            parameters = TileParameters(local / above, stored={"global_scale": above})
        else:
            parameters = grid.parameters(stored)  # type: ignore[attr-defined]
        quantized = QuantizedTensor(grid, codes, parameters)
        return quantized if rows is None else reordered(quantized, rows)


class _NearestCodes:
    """The codes of a plan's Linears to nearest, rows in the order of the checkpoint."""

    def __init__(self, maker: _Maker, plan: QuantizationPlan, placed: Sequence[Any]) -> None:
        self.maker, self.plan = maker, plan
        self.placed = {placement.stored: placement for placement in placed}

    def __call__(self, stored: str, load: Callable[[], Tensor]) -> QuantizedTensor:
        layer, placement = self.plan.sites[stored], self.placed[stored]
        weight = load().T.contiguous() if layer.transposed else load()
        return self.maker.nearest(placement, self.maker.kinds.of[placement.gguf], weight)


def check_range(name: str, weight: Tensor, quantized: QuantizedTensor) -> None:
    """Raise where float16 scales lose most of a weight (N, K) because it is too small or too large for them.

    Raises:
        NumericsError: names the tensor and the type.
    """
    d = quantized.parameters.stored["d"].abs()
    if not weight.numel() or (float(d.min()) > HALF_SMALLEST and float(d.max()) < HALF_LARGEST):
        return
    lost, total = (
        float(part.square().sum()) for part in ((quantized.dequantize() - weight).double(), weight.double())
    )
    if lost > LOST * total:
        kind = quantized.grid.kind  # type: ignore[attr-defined]
        raise NumericsError(
            f"{name} does not fit {kind}: {lost / total:.0%} of its squared weight would be lost, for its "
            f"largest number is {float(weight.abs().max()):.3g} and the scales are float16 numbers",
            hint=f"--override '{name.removesuffix('.weight')}=F32', or --type BF16",
        )


def reordered(quantized: QuantizedTensor, rows: Tensor) -> QuantizedTensor:
    """The same codes with row i taken from ``rows[i]``."""
    parameters = quantized.parameters.map(lambda value: value[rows])
    stored = {
        name: value if name == "global_scale" else value[rows]
        for name, value in quantized.parameters.stored.items()
    }
    parameters = TileParameters(parameters.scale, parameters.zero, parameters.minimum, stored)
    return QuantizedTensor(quantized.grid, quantized.codes[rows], parameters)
