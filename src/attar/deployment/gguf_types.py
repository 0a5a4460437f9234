"""A type of llama.cpp's for every tensor of a model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from attar.checkpoint.open import Checkpoint
from attar.checkpoint.processes import Processes
from attar.checkpoint.units import byte_count
from attar.deployment.settings import ExportSettings
from attar.errors import SettingsError
from attar.formats.coded import Coded
from attar.formats.gguf.architecture import sizes
from attar.formats.gguf.codes import exact_type
from attar.formats.gguf.placement import Placement
from attar.formats.gguf.quant_types import canonical, mix, overridden
from attar.formats.gguf.reader import GGUFReader
from attar.formats.gguf.tensor_map import architecture
from attar.formats.gguf.types import FILE_TYPES, TYPES
from attar.formats.mxfp4 import ExpertMXFP4Reader
from attar.formats.packed_reader import FormatReader
from attar.formats.readers import quant_method, reader
from attar.formats.rules import WeightRule
from attar.progress import Progress

FLOATS = ("F32", "F16", "BF16")
FEW_BITS = 4.0  # of a weight: below, rounding with data wins much back (docs/export.md)


@dataclass(frozen=True)
class TensorTypes:
    """The types of a file.

    Attributes:
        of: type by llama.cpp's name of the tensor.
        label: what goes into the file's name.
        file_type: ``general.file_type``.
        carried: tensors whose codes are those of the checkpoint.
        report: of a choice under a budget, for the card.
    """

    of: Mapping[str, str]
    label: str
    file_type: int
    carried: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    report: Mapping[str, Any] = field(default_factory=dict)

    def details(self, placed: Sequence[Any]) -> dict[str, Any]:
        """For the card: types, bytes, bits."""
        weights = bits = 0
        for placement in placed:
            count = math.prod(placement.shape)
            weights += count
            bits += int(count * TYPES[self.of[placement.gguf]].bits)
        return {
            "type": self.label,
            "types": dict(sorted(Counter(self.of.values()).items())),
            "tensor_bytes": bits // 8,
            "bits_per_weight": bits / weights,
            "carried": len(self.carried),
            **({"type_search": dict(self.report)} if self.report else {}),
        }


def refuse_type(settings: ExportSettings, placed: Sequence[Any]) -> None:
    """Raise where a type or an override cannot be.

    Raises:
        SettingsError: names the setting.
    """
    if settings.type != "auto":
        canonical(settings.type, settings.imatrix not in ("none", ""))
    overridden(matrices(placed), settings.overrides)


def matrices(placed: Sequence[Any]) -> list[str]:
    """Names of the file's matrices."""
    return list(dict.fromkeys(placement.gguf for placement in placed if placement.matrix))


def choose_kinds(
    source: Checkpoint,
    view: Any,
    placed: Sequence[Any],
    settings: ExportSettings,
    metadata: Mapping[str, Any],
    weighted: bool,
    processes: Processes,
    progress: Progress,
) -> TensorTypes:
    """The types that the settings ask for.

    Args:
        source: the checkpoint; ``view`` decodes it.
        weighted: scales will be searched with importance.
        processes: they share the measurements under a budget.

    Raises:
        SettingsError: the budget cannot be met, or an override does not fit a tensor.
    """
    if settings.bits or settings.size:
        return _budget(source, placed, settings, metadata, processes, progress)
    if settings.type == "auto":
        return _overridden(_as_stored(source, view, placed), placed, settings.overrides)
    return _mix(settings, view.config, placed, weighted)


def _mix(
    settings: ExportSettings, config: Mapping[str, Any], placed: Sequence[Any], weighted: bool
) -> TensorTypes:
    family = architecture(config)
    measured = sizes(config, family)
    mixed = mix(
        settings.type,
        {placement.gguf: placement.file_shape for placement in placed},
        layers=measured.layers,
        heads=measured.heads,
        kv_heads=1 if family.latent else measured.kv_heads,
        architecture=family.arch,
        experts=measured.of("experts"),
        imatrix=weighted,
        overrides=settings.overrides,
    )
    notes = [*mixed.notes]
    smallest = min(TYPES[mixed.kinds[placement.gguf]].bits for placement in placed if placement.matrix)
    if settings.rounding == "nearest" and smallest < FEW_BITS:
        notes.append(f"{settings.type} is rounded to nearest; --rounding gptq takes longer and loses less")
    return TensorTypes(mixed.kinds, settings.type, mixed.file_type, notes=tuple(notes))


def _as_stored(source: Checkpoint, view: Any, placed: Sequence[Any]) -> TensorTypes:
    """Codes kept where a type can hold them, everything else in its own number type."""
    packed = reader(source.with_mtp) if quant_method(source) else None
    of: dict[str, str] = {}
    wanted: dict[str, set[str | None]] = {}
    reasons = Counter[str]()
    for placement in placed:
        of[placement.gguf] = _float_kind(view, placement)
        if packed is None or placement.stored is None or not placement.matrix:
            continue
        kind, why = _stored_kind(packed, view.infos[placement.stored].stored, placement)  # type: ignore[attr-defined]
        wanted.setdefault(placement.gguf, set()).add(kind)
        if why:
            reasons[why] += 1
    carried = {name: kinds.pop() for name, kinds in wanted.items() if len(kinds) == 1 and None not in kinds}
    if uneven := [name for name, kinds in wanted.items() if len(kinds - {None}) > 1]:
        reasons["experts of a block in several types"] += len(uneven)
    of |= {name: str(kind) for name, kind in carried.items()}
    label = Counter(of[placement.gguf] for placement in placed if placement.matrix).most_common(1)[0][0]
    notes = [
        f"{count} tensors cannot keep their codes ({why}): stored as numbers"
        for why, count in reasons.items()
    ]
    number = FILE_TYPES["MXFP4_MOE"] if label == "MXFP4" else FILE_TYPES.get(label, 0)
    return TensorTypes(of, label, number, frozenset(carried), tuple(notes))


def _stored_kind(packed: FormatReader, name: str, placement: Any) -> tuple[str | None, str]:
    """The type that holds the codes of a stored matrix exactly; or None, and why there is none ("" where it
    has no codes). Blocks of a GGUF file stay as they are."""
    if isinstance(packed, GGUFReader) and (mine := packed.same_blocks(placement)):
        return packed.checkpoint.tensors[mine].block, ""
    coded = stored_codes(packed, name, placement)
    return (None, "") if coded is None else exact_type(*coded)


def stored_codes(packed: FormatReader, name: str, placement: Placement) -> tuple[Coded, WeightRule] | None:
    """Codes (N, K) of a placement, rows in the checkpoint's order, and their rule; None where it has none.

    Args:
        name: of the stored tensor.
    """
    if placement.scales or placement.columns is not None or placement.stored_rows:
        return None
    if placement.part is None:
        return None if placement.transposed else packed.codes(name)
    if placement.part.index is None or not isinstance(packed, ExpertMXFP4Reader) or not packed.is_coded(name):
        return None
    (stack, rule), rows = packed.expert_codes(name, placement.part.index), placement.part.rows or slice(None)
    return replace(stack, codes=stack.codes[rows], scale=stack.scale[rows]), rule


def _float_kind(view: Any, placement: Any) -> str:
    """The number type of a tensor that stays one: its own, and float32 for vectors."""
    if len(placement.shape) < 2 or not placement.matrix or placement.stored is None:
        return "F32"
    stored = view.infos[placement.stored].dtype
    return stored if stored in FLOATS else "F32"


def _budget(
    source: Checkpoint,
    placed: Sequence[Any],
    settings: ExportSettings,
    metadata: Mapping[str, Any],
    processes: Processes,
    progress: Progress,
) -> TensorTypes:
    from attar.deployment.gguf_type_search import search_types

    choice = search_types(
        source,
        placed,
        settings,
        bits=settings.bits,
        size=byte_count("size", settings.size),
        metadata=metadata,
        processes=processes,
        progress=progress,
    )
    label = f"{choice.bits_per_weight:.2f}bpw"
    return TensorTypes(choice.kinds, label, choice.file_type, notes=choice.notes, report=choice.report)


def _overridden(chosen: TensorTypes, placed: Sequence[Any], overrides: Sequence[str]) -> TensorTypes:
    of, types = dict(chosen.of), overridden(matrices(placed), overrides)
    for placement in placed:
        if placement.gguf in types:
            if placement.shape[-1] % TYPES[types[placement.gguf]].block:
                raise SettingsError(
                    "overrides",
                    types[placement.gguf],
                    f"a type whose block divides {placement.shape[-1]}, the inputs of {placement.gguf}",
                )
            of[placement.gguf] = types[placement.gguf]
    return replace(chosen, of=of, carried=chosen.carried - types.keys())
