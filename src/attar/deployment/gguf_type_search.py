"""A mix of llama.cpp's types under a budget: for each tensor the type that costs the model least.

    minimise  sum_g KL[g, c_g]   under   bytes of all tensors <= budget      one type c_g for each group g

Letters: g a group of tensors that share a type (q, k and v; gate and up, of all experts of a layer; the
embedding, with the head where they are one; the head); c a type; KL[g, c] of the model with g alone in type
c, measured once and cached (attar.quantization.mixed_precision.sensitivity); K inputs of a tensor.

The budget is an average of bits or the size of the file (:class:`TypeBudget`); the choice is exact
(attar.quantization.mixed_precision.allocate).

Tensors that llama.cpp never quantizes are F32 and count too. A group with a tensor whose K is no multiple of
32 stays F16. Types given by hand are settled first and not measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from attar.checkpoint.open import Checkpoint
from attar.checkpoint.processes import SINGLE_PROCESS, Processes
from attar.deployment.settings import ExportSettings
from attar.errors import ModelError, SettingsError
from attar.formats.gguf.container import MetadataValue
from attar.formats.gguf.placement import Placement
from attar.formats.gguf.quant_types import ALIASES, overridden, quantizable, tensor_bytes
from attar.formats.gguf.quant_types import bits as average_bits
from attar.formats.gguf.types import FILE_TYPES
from attar.formats.gguf.values import encode, string
from attar.formats.gguf.writer import ALIGNMENT
from attar.formats.readers import Decoded, quant_method
from attar.models.anatomy.parts import Anatomy
from attar.models.loading.single_experts import single_experts
from attar.models.loading.stored import stored_names
from attar.progress import SILENT, Progress
from attar.quantization.grids import Grid
from attar.quantization.grids.ggml import GGMLGrid
from attar.quantization.mixed_precision.allocate import Allocation, Option, allocate, frontier
from attar.quantization.mixed_precision.rounded_options import rounding_of
from attar.quantization.mixed_precision.search import (
    Interaction,
    interaction,
    with_falling,
)
from attar.quantization.mixed_precision.sensitivity import (
    CandidateGrid,
    RoundFunction,
    measure,
)
from attar.sensitivity.measurements import Measurement
from attar.sensitivity.weight_changes import SensitivityInputs, group_name, load_inputs, shared_groups

WIDE = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
"""Candidates where 256 divides K."""

NARROW = ("Q4_0", "IQ4_NL", "Q5_0", "Q8_0")
"""Candidates elsewhere."""

KEYS: dict[str, MetadataValue] = {"general.file_type": 0, "general.quantization_version": 0}
"""Metadata that depends on the choice; its size does not."""


@dataclass(frozen=True)
class TypeChoice:
    """A type for every tensor of a file.

    Attributes:
        kinds: type by GGUF name, in the order of the placements.
        bits_per_weight: bytes of all tensors times 8, for each weight of the file.
        size: bytes of the file, as far as its metadata is known.
        file_type: ``general.file_type``: of the mix that is named after the type of most weights.
        report: for the card: predicted and measured KL, the gap to the optimum, the curve of KL over bits.
    """

    kinds: dict[str, str]
    bits_per_weight: float
    size: int
    file_type: int
    notes: tuple[str, ...]
    report: dict[str, Any]


def search_types(
    checkpoint: Checkpoint,
    placed: Sequence[Placement],
    settings: ExportSettings,
    *,
    bits: float = 0.0,
    size: int = 0,
    metadata: Mapping[str, MetadataValue] | None = None,
    processes: Processes = SINGLE_PROCESS,
    progress: Progress = SILENT,
) -> TypeChoice:
    """The types of least summed KL under a budget.

    Args:
        checkpoint: dense, or quantized and taken as what it decodes to.
        settings: the calibration text, the device, and types given by hand.
        bits: the budget as an average; 0: ``size`` is the budget.
        size: the budget in bytes of the file.
        metadata: the file's metadata; counts for ``size``, with :data:`KEYS`.
        processes: they share the measurements.

    Raises:
        SettingsError: not even the smallest types fit; the message has the least budget.
        ModelError: no tensor is left to choose a type for.
    """
    on = load_inputs(checkpoint, settings)
    layout = file_layout(on.model, on.anatomy, checkpoint, placed, settings.overrides)
    if not layout.groups:
        raise ModelError("no tensor can have one of llama.cpp's types", hint="see --type F16")
    budget = TypeBudget(layout, bits, size, head_bytes(layout.shapes, {**KEYS, **(metadata or {})}))
    budget.check_smallest()
    grids = candidates()
    with rounding_of(
        checkpoint,
        layout.groups,
        grids,
        settings.rounding,
        settings,
        fits=fits,
        processes=processes,
        progress=progress,
    ) as rounding:
        measured = measure(
            on.model,
            layout.groups,
            grids,
            on.batches,
            on.file,
            key=on.key,
            blocks=on.blocks,
            after_blocks=_after_blocks(on),
            processes=processes,
            fits=fits,
            rounding=rounding,
            progress=progress,
        )
        chosen, curve = _choose(budget, with_falling(measured))
        kinds = layout.spread(chosen.choice)
        joint = _joint_kl(on, layout, chosen, grids, rounding)
    report = {"gap": chosen.gap, **asdict(joint), "curve": [list(point) for point in curve]}
    return TypeChoice(
        kinds=kinds,
        bits_per_weight=average_bits(kinds, layout.shapes)[0],
        size=budget.head + data_bytes(kinds, layout.shapes),
        file_type=_file_type(kinds, layout.shapes),
        notes=tuple(_notes(layout, joint, chosen.gap)),
        report={**report, "measurements": on.file.name},
    )


def candidates() -> dict[str, CandidateGrid]:
    """Every type that may be chosen, as a grid; values are decoded in float32, whatever is stored."""

    def grid(kind: str) -> CandidateGrid:
        return lambda storage: GGMLGrid(kind)

    return {kind: grid(kind) for kind in dict.fromkeys((*WIDE, *NARROW))}


def fits(grid: Grid, shape: tuple[int, int]) -> bool:
    """Whether a type is a candidate for an (N, K) weight."""
    assert isinstance(grid, GGMLGrid)
    return shape[1] % 32 == 0 and grid.kind in kinds_for(shape[1])


def kinds_for(columns: int) -> tuple[str, ...]:
    """The candidates for K inputs, a multiple of 32."""
    return NARROW if columns % 256 else WIDE


def file_layout(
    model: Any,
    anatomy: Anatomy,
    checkpoint: Checkpoint,
    placed: Sequence[Placement],
    overrides: Sequence[str] = (),
) -> FileLayout:
    """Sort the tensors into those of a fixed type and groups of modules.

    Args:
        model: its modules, which may be empty (``models/loading/empty.py``).
        overrides: as :func:`search_types` has them.
    """
    view: Any = single_experts(Decoded(checkpoint) if quant_method(checkpoint) else checkpoint)
    stored = {name: module for module, name in stored_names(model, view).items()}
    shapes = {placement.gguf: placement.file_shape for placement in placed}
    free = [
        placement
        for placement in placed
        if placement.matrix and placement.stored and quantizable(placement.gguf, placement.shape)
    ]
    names = list(dict.fromkeys(placement.gguf for placement in free))
    overridden_kinds = overridden(names, overrides)
    tensors: dict[str, list[str]] = {}
    for placement in free:
        if placement.gguf not in overridden_kinds:
            parameter = placement.single or stored[str(placement.stored)]
            tensors.setdefault(parameter.removesuffix(".weight"), []).append(placement.gguf)
    inputs = {module: {shapes[name][-1] for name in names} for module, names in tensors.items()}
    groups = {
        group: modules
        for group, modules in _groups(anatomy, inputs).items()
        if all(columns % 32 == 0 for module in modules for columns in inputs[module])
    }
    inside = [name for modules in groups.values() for module in modules for name in tensors[module]]
    left = [name for names in tensors.values() for name in names if name not in inside]
    kinds = (
        {placement.gguf: "F32" for placement in placed if placement.gguf not in inside}
        | overridden_kinds
        | dict.fromkeys(left, "F16")
    )
    return FileLayout(shapes, kinds, tensors, groups)


def _groups(anatomy: Anatomy, modules: Mapping[str, set[int]]) -> dict[str, list[str]]:
    """Modules by group: the embedding, the blocks' Linears, the head. Linears with other inputs than their
    mates are a group of their own: the down of a layer's experts.

    Args:
        modules: inputs of each one's tensors.
    """
    linears = [name for block in anatomy.blocks for name in block.linears if name in modules]
    inner: dict[str, list[str]] = {}
    for mates in shared_groups(anatomy.blocks, linears).values():
        alike: dict[frozenset[int], list[str]] = {}
        for name in mates:
            alike.setdefault(frozenset(modules[name]), []).append(name)
        inner |= {group_name(members): members for members in alike.values()}
    before = [name for name in (anatomy.embedding,) if name in modules]
    after = [name for name in (anatomy.head,) if name in modules and name not in before]
    return {name: [name] for name in before} | inner | {name: [name] for name in after if name}


def _after_blocks(on: SensitivityInputs) -> list[str]:
    """The head, where the head is a separate tensor."""
    return [on.anatomy.head] if on.anatomy.head and not on.anatomy.tied else []


def _choose(
    budget: TypeBudget, measured: Sequence[Measurement]
) -> tuple[Allocation, tuple[tuple[float, float], ...]]:
    """A type for each group, and (bits a weight, KL) from the smallest file to the best one."""
    options: dict[str, list[Option]] = {group: [] for group in budget.layout.groups}
    for sensitivity in measured:
        if sensitivity.option not in budget.layout.candidates(sensitivity.group):
            continue
        if math.isfinite(sensitivity.kl):
            options[sensitivity.group].append(
                Option(
                    sensitivity.option, budget.group(sensitivity.group, sensitivity.option), sensitivity.kl
                )
            )
    points = frontier(options)
    budget.check(points[0].bits)
    curve = tuple(((budget.settled + point.bits) / budget.layout.weights, point.loss) for point in points)
    return allocate(options, budget.left), curve


def _joint_kl(
    on: SensitivityInputs,
    layout: FileLayout,
    chosen: Allocation,
    grids: Mapping[str, CandidateGrid],
    rounding: RoundFunction,
) -> Interaction:
    """The KL of all groups in their types at once, beside the sum of theirs."""
    schemes = {module: chosen.choice[group] for group, names in layout.groups.items() for module in names}
    work = on.file.with_name(f".{on.file.name}.with_mtp")
    return interaction(on.model, schemes, chosen.loss, grids, on.batches, work, rounding=rounding)


def _file_type(kinds: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The number of the mix that is named after the type of most weights."""
    weights: Counter[str] = Counter()
    for name, kind in kinds.items():
        weights[kind] += math.prod(shapes[name])
    most = weights.most_common(1)[0][0]
    return FILE_TYPES[ALIASES.get(most, most)]


def _notes(layout: FileLayout, joint: Interaction, gap: float) -> Iterator[str]:
    yield (
        f"types chosen by measured sensitivity: KL {joint.measured:.4g} nats a token on the calibration "
        f"text, {joint.predicted:.4g} predicted"
    )
    if gap > 0:
        yield f"another choice may be better by at most {gap:.2g} nats a token"
    names = [name for group in layout.groups for name in layout.of(group)]
    narrow = [name for name in names if layout.shapes[name][-1] % 256]
    if narrow:
        yield f"{len(narrow)} tensors have inputs that 256 does not divide: one of {', '.join(NARROW)}"
    left = [name for name, kind in layout.kinds.items() if kind == "F16"]
    if left:
        yield f"{len(left)} tensors are F16"


HEADER = 24  # bytes before the metadata: magic, version, two counts
SMALLEST = "every tensor in its smallest type"


@dataclass(frozen=True)
class FileLayout:
    """The tensors of a file: those whose type is to be chosen, and the others.

    Attributes:
        kinds: types that are settled.
        tensors: names of the tensors of each module that gets a type.
        groups: modules by group.
    """

    shapes: dict[str, tuple[int, ...]]
    kinds: dict[str, str]
    tensors: dict[str, list[str]]
    groups: dict[str, list[str]]

    def of(self, group: str) -> list[str]:
        """Names of a group's tensors."""
        return list(dict.fromkeys(name for module in self.groups[group] for name in self.tensors[module]))

    def candidates(self, group: str) -> tuple[str, ...]:
        """Types that all tensors of a group can have."""
        first, *others = (kinds_for(self.shapes[name][-1]) for name in self.of(group))
        return tuple(kind for kind in first if all(kind in kinds for kinds in others))

    def spread(self, choice: Mapping[str, str]) -> dict[str, str]:
        """The type of every tensor, given the type of every group."""
        chosen = {name: kind for group, kind in choice.items() for name in self.of(group)}
        return {name: chosen.get(name) or self.kinds[name] for name in self.shapes}

    @property
    def weights(self) -> int:
        """How many weights the file has."""
        return sum(math.prod(shape) for shape in self.shapes.values())


@dataclass(frozen=True)
class TypeBudget:
    """What may be spent, in bits of stored tensors.

    Attributes:
        layout: what it is spent on.
        bits: the average; with ``size`` not looked at.
        size: bytes of the file, or 0.
        head: bytes of the file before its data.
    """

    layout: FileLayout
    bits: float
    size: int
    head: int

    def cost(self, kinds: Mapping[str, str]) -> int:
        """Bits of tensors in these types."""
        return 8 * data_bytes(kinds, self.layout.shapes, padding=self.size > 0)

    def group(self, group: str, kind: str) -> int:
        """Bits of a group in a type."""
        return self.cost(dict.fromkeys(self.layout.of(group), kind))

    @property
    def settled(self) -> int:
        """Bits that are spent already."""
        return self.cost(self.layout.kinds) + (8 * self.head if self.size else 0)

    @property
    def left(self) -> int:
        """Bits for the groups; may be negative."""
        allowed = 8 * self.size if self.size else math.floor(self.bits * self.layout.weights)
        return allowed - self.settled

    def check(self, least: int) -> None:
        """Raise where the groups need more bits than are left."""
        if least <= self.left:
            return
        least += self.settled
        if self.size:
            raise SettingsError("size", self.size, f"at least {-(-least // 8)} bytes: {SMALLEST}")
        average = math.ceil(1000 * least / self.layout.weights) / 1000
        raise SettingsError("bits", self.bits, f"at least {average:g}: {SMALLEST}")

    def check_smallest(self) -> None:
        """The same for the smallest type of each group."""
        groups = self.layout.groups
        self.check(
            sum(min(self.group(name, kind) for kind in self.layout.candidates(name)) for name in groups)
        )


def head_bytes(shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, MetadataValue]) -> int:
    """Bytes of a GGUF file of one part before its data."""
    fields = sum(len(encode(key, value)) for key, value in metadata.items())
    infos = sum(len(string(name)) + 16 + 8 * len(shape) for name, shape in shapes.items())
    return _padded(HEADER + fields + infos)


def data_bytes(kinds: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], padding: bool = True) -> int:
    """Bytes of tensors, with what fills them up to the file's alignment."""
    sizes = [tensor_bytes(kind, shapes[name]) for name, kind in kinds.items()]
    return sum(_padded(size) if padding else size for size in sizes)


def _padded(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
