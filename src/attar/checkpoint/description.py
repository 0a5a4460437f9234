"""What is known of a checkpoint, as JSON and as plain text: at most 100 columns, no colour, the same on every
terminal."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from attar.checkpoint.card import Parent, plain
from attar.checkpoint.geometry import ModelGeometry
from attar.checkpoint.licences import UNKNOWN, Duties, age_in_days
from attar.checkpoint.parts import ModelPart
from attar.checkpoint.units import bytes_text, count_text
from attar.errors import AttarError
from attar.options import differing, nest, option_fields
from attar.printable import printable

WIDTH = 100
STAGES = "attar.recipe.stages"
"""Module with the settings of each verb; by name, because recipe/ is above this package."""

_STALE_DAYS = 365


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A checkpoint's description from its headers and small files.

    Attributes:
        dtype: torch's name of the number type of its dense tensors.
        parameters: as before quantization; tied weights count once.
        bits_per_weight: stored bits per parameter, scales and all other tensors included.
        tensor_bytes: bytes of all tensors.
        disk_bytes: bytes of all files of the folder, or of all parts of the file.
        tied: whether the head is the embedding.
        quantization: method, format and bits of the stored codes, or None.
        zeros: method, fraction and pattern of the zeros that pruning set, as its card says; None elsewhere.
        draft_head: kind, target and sizes, and its acceptance at each position as the card has it; None for a
            model.
        container: types and metadata of a single-file model; None for a folder.
        oddities: what a user should know of it, and why verbs refuse it: verdict, text and hint of each.
        stage: the verb that made it; ``original`` without a card.
        command: a command line that makes it again.
        lineage: the checkpoint itself as a record with all its ancestors.
    """

    name: str
    path: Path
    architecture: str
    model_type: str
    dtype: str
    parameters: int
    parts: tuple[ModelPart, ...]
    bits_per_weight: float
    tensor_bytes: int
    disk_bytes: int
    weight_files: int
    tied: bool
    geometry: ModelGeometry
    quantization: dict[str, Any] | None
    zeros: dict[str, Any] | None
    draft_head: dict[str, Any] | None
    container: dict[str, Any] | None
    oddities: tuple[dict[str, str], ...]
    stage: str
    command: str
    lineage: Parent
    licence: Duties
    measurements: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """JSON content; ``kv_bytes_per_token`` and ``context`` are repeated at the top level."""
        parts = [{**asdict(part), "bits_per_weight": part.bits_per_weight} for part in self.parts]
        top = {"kv_bytes_per_token": self.geometry.kv_bytes_per_token, "context": self.geometry.context}
        content = plain({**asdict(self), "parts": parts, **top})
        assert isinstance(content, dict)
        return content

    def render(self) -> str:
        """Plain text of at most 100 columns, without a final line break."""
        lines = [f"{self.name}  {self.architecture}", *_facts(self), "", *_parts(self)]
        if self.container:
            lines += ["", *_types(self.container)]
        lines += ["", "Lineage", *_tree(self.lineage)]
        lines += ["", *_licence(self.licence)]
        if self.measurements:
            lines += ["", "Measurements", *_measurements(self.measurements)]
        if self.command:
            lines += ["", "To make it again", *_wrapped(self.command, "  ", "      ")]
        if self.container:
            lines += ["", "Metadata", *_metadata(self.container["metadata"])]
        # a line break in a line comes from a file
        return "\n".join(printable(line.rstrip().replace("\n", "\\n")) for line in lines)


def _facts(inspection: Inspection) -> Iterator[str]:
    shape = inspection.geometry
    files = "1 file" if inspection.weight_files == 1 else f"{inspection.weight_files} files"
    yield _fact("file" if inspection.container else "folder", str(inspection.path))
    yield _fact(
        "parameters",
        f"{count_text(inspection.parameters)} ({inspection.parameters:,}), "
        f"{inspection.bits_per_weight:.2f} bits each, {inspection.dtype}",
    )
    yield _fact(
        "size",
        f"{bytes_text(inspection.disk_bytes)} on disk, {bytes_text(inspection.tensor_bytes)} in {files}",
    )
    if inspection.draft_head:
        yield from _draft_head(inspection.draft_head)
        return
    heads = (
        f"{shape.heads} heads"
        if shape.heads == shape.kv_heads
        else f"{shape.heads} heads / {shape.kv_heads} KV"
    )
    tied = ", head tied to the embedding" if inspection.tied else ""
    yield _fact(
        "shape", f"{shape.layers} layers, {shape.hidden} wide, {heads}, {shape.vocabulary} tokens{tied}"
    )
    if shape.kv_bytes_per_token is not None:
        yield _fact("KV cache", _cache(shape.kv_bytes_per_token, shape.context, inspection.dtype))
    if shape.sliding_layers and shape.window:
        yield _fact("", f"{shape.sliding_layers} layers keep only the last {shape.window:,} tokens")
    yield _fact("context", f"{shape.context:,} tokens" if shape.context else "not stated")
    if inspection.quantization:
        yield _fact("quantized", _codes(inspection.quantization))
    if inspection.zeros:
        yield _fact("zeros", _zeros(inspection.zeros))
    for odd in inspection.oddities:
        yield _fact(odd["verdict"], odd["text"])


def _fact(label: str, text: str) -> str:
    return f"  {label:<12}{text}"


def _draft_head(head: dict[str, Any]) -> Iterator[str]:
    """What it drafts, for which model, and how well."""
    drafts = f"{head['drafts']} drafts, " if head["drafts"] else ""
    yield _fact("draft head", f"{head['kind']}, {drafts}for {head['target']}")
    if head["layers"]:
        layers = ", ".join(map(str, head["layers"]))
        yield _fact("reads", f"the states behind layers {layers}, {head['hidden']} wide")
    draft_tokens, all_tokens = head["draft_vocabulary"], head["vocabulary"]
    if all_tokens:
        yield _fact(
            "proposes",
            f"{draft_tokens:,} of {all_tokens:,} tokens" if draft_tokens else f"{all_tokens:,} tokens",
        )
    for key, how in (("agreement", "greedy"), ("acceptance", "at temperature 1")):
        rates = head["drafting"].get(key)
        if isinstance(rates, list) and all(isinstance(rate, int | float) for rate in rates):
            shown = ", ".join(f"{rate:.3f}" for rate in rates)
            yield _fact("accepted" if how == "greedy" else "", f"{shown} at each position, {how}")


def _cache(per_token: int, context: int | None, dtype: str) -> str:
    full = f", {bytes_text(per_token * context)} at {context:,} tokens" if context else ""
    return f"{bytes_text(per_token)} per token in {dtype}{full}"


def _codes(quantization: dict[str, Any]) -> str:
    """Such as ``W4A16 group 128, pack-quantized (compressed-tensors): 14 tensors at 4.16 bits``."""
    schemes = [_scheme(scheme) for scheme in quantization["schemes"]]
    form = [quantization["format"]] if quantization["format"] else []
    bits = quantization["bits_per_weight"]
    stored = f": {quantization['tensors']} tensors at {bits:.2f} bits" if bits else ""
    kinds = ", ".join([" and ".join(dict.fromkeys(schemes)), *form] if schemes else form)
    return f"{kinds} ({quantization['method']}){stored}"


def _scheme(scheme: dict[str, Any]) -> str:
    """Such as ``W4A16 group 128``, or ``W8A8 float blocks of 128 x 128``."""
    kind = f" {scheme['type']}" if scheme["type"] not in (None, "int") else ""
    group = f" group {scheme['group_size']}" if (scheme["group_size"] or 0) > 0 else ""
    block = f" blocks of {' x '.join(map(str, scheme['block']))}" if scheme["block"] else ""
    return f"W{scheme['bits']}A{scheme['activation_bits'] or 16}{kind}{group}{block}"


def _zeros(zeros: dict[str, Any]) -> str:
    """Such as ``50.0 % of the 14.2 M weights of the blocks' Linears, 2:4, by wanda``."""
    pattern = f", {zeros['pattern']}" if zeros["pattern"] != "none" else ""
    linears = f"the {count_text(zeros['of'])} weights of the blocks' Linears"
    return f"{zeros['fraction'] * 100:.1f} % of {linears}{pattern}, by {zeros['method']}"


def _parts(inspection: Inspection) -> Iterator[str]:
    yield f"  {'part':<12}{'parameters':>12}{'share':>9}{'bytes':>12}{'bits/weight':>14}"
    for part in inspection.parts:
        yield _part(part, inspection.parameters)


def _part(part: ModelPart, total: int) -> str:
    share = f"{part.parameters / max(total, 1):.1%}"
    bits = f"{part.bits_per_weight:.2f}" if part.bits_per_weight is not None else "tied"
    return (
        f"  {part.name:<12}{count_text(part.parameters):>12}{share:>9}{bytes_text(part.bytes):>12}{bits:>14}"
    )


def _types(container: dict[str, Any]) -> Iterator[str]:
    """The types of a file's tensors, the one with most bytes first."""
    yield f"{container['format']} version {container['version']}, {container['file_type']}"
    yield f"  {'type':<12}{'parameters':>12}{'tensors':>9}{'bytes':>12}{'bits/weight':>14}"
    for kind in container["types"]:
        yield (
            f"  {kind['type']:<12}{count_text(kind['parameters']):>12}{kind['tensors']:>9}"
            f"{bytes_text(kind['bytes']):>12}{kind['bits_per_weight']:>14.2f}"
        )


def _metadata(values: dict[str, Any]) -> Iterator[str]:
    """Keys and values of a file, one line for each."""
    width = max((len(key) for key in values), default=0) + 2
    for key, value in values.items():
        if isinstance(value, dict):
            text = f"{value['length']:,} of {value['kind'][1:-1]}"
        elif isinstance(value, str):
            text = json.dumps(value, ensure_ascii=False)[1:-1]
        else:
            text = json.dumps(value, ensure_ascii=False)
        yield _shortened(f"  {key:<{width}}{text}")


def _tree(root: Parent) -> Iterator[str]:
    yield f"  {_node(root)}"
    yield from _branches(root.parents, "  ")


def _branches(parents: Sequence[Parent], indent: str) -> Iterator[str]:
    """The ancestors as a tree, teachers on dotted branches."""
    for index, parent in enumerate(parents):
        last = index + 1 == len(parents)
        arm = "┄ " if parent.role == "signal" else "─ "
        yield _shortened(f"{indent}{'└' if last else '├'}{arm}{_node(parent)}")
        yield from _branches(parent.parents, indent + ("   " if last else "│  "))


def _node(parent: Parent) -> str:
    teacher = " (teacher)" if parent.role == "signal" else ""
    settings = [
        f"{name} {_short(value)}"
        for name, value in _changed(parent).items()
        if value not in (None, [], (), "")
    ]
    licence = [f"licence {' and '.join(parent.licence['ids'])}"] if parent.licence.get("ids") else []
    details = ", ".join(settings if parent.parents else licence)
    return _shortened(f"{parent.name}{teacher}  {parent.stage}{': ' if details else ''}{details}")


def _changed(parent: Parent) -> dict[str, Any]:
    """The main settings of a stage, and the settings that are not their defaults today; all settings of an
    unknown stage."""
    spec = import_module(STAGES).STAGES.get(parent.stage)
    if spec is None:
        return parent.settings
    cls = spec.settings_class()
    known = {option.field.name for option in option_fields(cls)}
    values = {
        key: tuple(value) if isinstance(value, list) else value for key, value in parent.settings.items()
    }
    try:
        changed = differing(nest(cls, {name: value for name, value in values.items() if name in known}))
    except (AttarError, AttributeError, TypeError, ValueError):  # a card has values of any type
        return parent.settings
    main = ("scheme", "method", "format", "ratio", "" if "method" in known else "steps")
    return {name: value for name, value in values.items() if name in changed or name in main}


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str) and "\n" in value:  # the YAML of a merge
        return f"of {len(value.splitlines())} lines"
    return ",".join(str(item) for item in value) if isinstance(value, list | tuple) else str(value)


def _shortened(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"


def _licence(licence: Duties) -> Iterator[str]:
    yield f"Licence duties: {licence.status.replace('_', ' ')}  (help, not legal advice)"
    known = [source for source in licence.sources if source.id != UNKNOWN]
    for source in dict.fromkeys((source.title, source.role, source.model) for source in known):
        yield from _wrapped(f"{source[0]}, by the {source[1]} of {source[2]}", "  ", "    ")
    for acceptance in licence.accepted:
        yield from _wrapped(f"{acceptance.id} was accepted: {acceptance.reason}", "  ", "    ")
    for duty in licence.duties:
        yield from _wrapped(duty, "  - ", "    ")
    for words in licence.display:
        yield from _wrapped(f'Show "{words}".', "  - ", "    ")
    checked = [source.checked_on for source in licence.sources if source.checked_on]
    if checked and age_in_days(datetime.now(UTC).date()) > _STALE_DAYS:
        yield f"  The licence data was checked on {min(checked)}, more than a year ago: look at the texts."


def _measurements(measurements: dict[str, Any]) -> Iterator[str]:
    for name, value in measurements.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        text = (
            bytes_text(value)
            if name.endswith("bytes")
            else f"{value:,}"
            if isinstance(value, int)
            else f"{value:.5g}"
        )
        yield f"  {name.replace('_', ' '):<26}{text:>12}"


def _wrapped(text: str, first: str, subsequent: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=subsequent,
        break_on_hyphens=False,
        break_long_words=False,
    )
