"""What a person should know of a merge that is carried out all the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attar.merging.config.schema import Filtered, MergeConfig, Parameters
from attar.merging.member import Member
from attar.merging.methods.method import Method
from attar.merging.planning.naming import text_part
from attar.merging.planning.tensor_map import TensorMap

_MEANING = (
    "num_attention_heads",
    "num_key_value_heads",
    "n_head",
    "head_dim",
    "hidden_act",
    "activation_function",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "sliding_window",
    "layer_types",
)
"""Keys of a config that change what the same weights compute."""


def remarks(config: MergeConfig, method: Method, donor: Member, found: TensorMap) -> Iterator[str]:
    """Notes on a merge, one line each: configs that differ, parameters without effect, slices that pass.

    Args:
        config: the document.
        method: its method.
        donor: the model whose config the result gets.
        found: the tensor map.
    """
    known = {parameter.name for parameter in (*method.shared, *method.each)}
    for level in _levels(config):
        for name, setting in level.items():
            if name not in known:
                yield f"{setting.where}: {name} is not a parameter of {method.name}: without effect"
    pieces = [piece for parts in found.pieces.values() for piece in parts]
    used = {start.member.index: start.member for piece in pieces for start in piece.all()}
    for member in (used[index] for index in sorted(used)):
        yield from _differences(donor, member)
    for piece in pieces:
        names = (
            ", ".join(name for name in piece.base.source.parameters if name in known) if piece.base else ""
        )
        if piece.base is not None and names:
            label = piece.base.member.label
            yield f"{piece.base.source.where}: {label} is the base model: {names} without effect"
        if piece.passed:
            label = piece.starts[0].member.label
            yield f"{piece.slice.where}: the base model alone: the layers of {label} are taken as they are"
    names_of = [row.name for row in found.rows] + [tap.name for row in found.rows for tap in row.taps]
    for entry in _filters(config):
        if entry.filter not in (None, "*") and not any(str(entry.filter) in name for name in names_of):
            yield f"{entry.where}: the filter {entry.filter!r} fits no tensor"


def _differences(donor: Member, member: Member) -> Iterator[str]:
    """Keys in which a model's config differs from that of the result."""
    ours, theirs = donor.view.config, member.view.config
    if ours.get("model_type") != theirs.get("model_type"):
        yield (
            f"{member.label} is a {theirs.get('model_type')}, {donor.label} is a {ours.get('model_type')}:"
            " the shapes fit, and the result is called what the latter is"
        )
    for key in _MEANING:
        mine, other = _value(ours, key), _value(theirs, key)
        if mine != other and not (key == "layer_types" and (mine is None or other is None)):
            yield f"{key} differs: {_short(mine)} in {donor.label} (taken), {_short(other)} in {member.label}"


def _value(config: dict[str, Any], key: str) -> Any:
    return text_part(config).get(key)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _filters(config: MergeConfig) -> Iterator[Filtered]:
    """Every entry of a filtered setting, in the order of the levels."""
    for level in _levels(config):
        for setting in level.values():
            if isinstance(setting.value, tuple):
                yield from (entry for entry in setting.value if isinstance(entry, Filtered))


def _levels(config: MergeConfig) -> list[Parameters]:
    """The parameters of every level: of the merge, of modules, of slices, of sources."""
    slices = [each for module in config.modules for each in module.slices]
    levels: list[Parameters] = [config.parameters, *(module.parameters for module in config.modules)]
    levels += [each.parameters for each in slices]
    return levels + [source.parameters for each in slices for source in each.sources]
