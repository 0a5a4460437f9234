"""Stacks of layers, found in the names of a checkpoint's tensors.

``model.layers.3.mlp.up_proj.weight`` belongs to layer 3 of the stack ``model.layers``: the outermost number
of a dotted name is the layer (numbers further in are experts, or the parts of a T5 block). A stack's numbers
run from 0 without a gap, and its last word is one that stacks are called by, or its size is a number of
layers that the config names. What the config says of layers must be there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from attar.checkpoint.parts import part_of
from attar.errors import ModelError

_WORDS = re.compile(r"(layers?|h|blocks?|resblocks)$")
"""The last word of a stack's prefix."""

LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""The number of layers in a config, by family."""

_FURTHER_KEYS = ("encoder_layers", "decoder_layers", "num_decoder_layers", "depth")
_INNER = ("text_config", "vision_config", "audio_config", "encoder", "decoder")
_FIRST = re.compile(r"embed|^wte$|^wpe$|^shared$|^project_in$|^ln_pre$")
"""A word in the names of what stands before the layers."""

_NOT_ROWS = re.compile(r"position|^wpe$|pos_|token_type|segment|patch|rotary|type_embed")
"""A word in the names of embeddings that are not of the vocabulary."""

_BUFFERS = re.compile(
    r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias|position_ids|attention\.(masked_)?bias)$"
)
"""Tensors that old checkpoints store although they follow from the config."""


@dataclass(frozen=True)
class Stack:
    """Layers that stand one above the other.

    Attributes:
        prefix: what stands before the number, without the dot; empty where the number comes first.
        count: how many.
    """

    prefix: str
    count: int


@dataclass(frozen=True)
class Place:
    """Where a tensor stands in its model.

    Attributes:
        stack: the stack it is in, or None.
        layer: number of its layer there.
        rest: its name inside the layer; outside of stacks its whole name.
    """

    stack: Stack | None
    layer: int
    rest: str


def find_stacks(names: Iterable[str], config: Mapping[str, Any], model: str) -> tuple[Stack, ...]:
    """The stacks of a model, by prefix; those of the size that the config gives to the language model first.

    Args:
        names: of all tensors.
        config: content of ``config.json``.
        model: what to call it in errors.

    Raises:
        ModelError: there is no stack, or none of the size that the config says.
    """
    numbers: dict[str, set[int]] = {}
    for name in names:
        prefix, number, _ = _split(name)
        if number is not None:
            numbers.setdefault(prefix, set()).add(number)
    sizes = {prefix: len(found) for prefix, found in numbers.items() if max(found) == len(found) - 1}
    named = _all_sizes(config)
    stacks = [
        Stack(prefix, size)
        for prefix, size in sorted(sizes.items())
        if _WORDS.search(prefix.rpartition(".")[2]) or (size in named and size > 1)
    ]
    expected = layer_count(config)
    allowed = (expected, (expected or 0) + (config.get("num_nextn_predict_layers") or 0))
    if expected is not None and not any(stack.count in allowed for stack in stacks):
        found = ", ".join(f"{s.count} in {s.prefix}" for s in stacks) or _gaps(numbers)
        raise ModelError(
            f"{model}: config.json says {expected} layers, but the tensors' names have {found}",
            hint="the checkpoint is incomplete, or its config is of another model",
        )
    if not stacks:
        raise ModelError(f"{model}: no layers found in the names of its tensors")
    return tuple(sorted(stacks, key=lambda stack: (stack.count not in allowed, stack.prefix)))


def place_of(name: str, stacks: Iterable[Stack]) -> Place:
    """Where a tensor stands."""
    prefix, number, rest = _split(name)
    for stack in stacks:
        if number is not None and stack.prefix == prefix:
            return Place(stack, number, rest)
    return Place(None, 0, name)


def layer_name(prefix: str, layer: int, rest: str) -> str:
    """A tensor's name from its place."""
    return f"{prefix}.{layer}.{rest}" if prefix else f"{layer}.{rest}"


def layer_count(config: Mapping[str, Any]) -> int | None:
    """The number of layers of a config's language model, or None where it says none."""
    for inner in (text_part(config), config):
        for key in LAYER_KEYS:
            value = inner.get(key)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config says of its language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def kind_of(name: str, in_stack: bool) -> str:
    """``"layer"``, ``"embedding"``, ``"head"`` or ``"other"``."""
    if in_stack:
        return "layer"
    if name.split(".")[0] == "shared" or name.endswith(".shared.weight"):
        return "embedding"
    part = part_of(name)
    return part if part in ("embedding", "head") else "other"


def comes_first(name: str) -> bool:
    """Whether a tensor outside the layers stands before them (it is merged as the first slice says)."""
    return kind_of(name, False) != "head" and any(_FIRST.search(word) for word in name.lower().split("."))


def is_buffer(name: str) -> bool:
    """Whether a tensor follows from the config, so that nothing is lost with it."""
    return bool(_BUFFERS.search(name))


def token_embedding(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Name of the matrix with one row a token, or None.

    Args:
        tensors: those outside the stacks, by name.
        config: content of ``config.json``.

    Returns:
        The first by name of those with as many rows as the config's vocabulary; where none has, of those with
        the most rows.
    """
    rows = {
        name: info.shape[0]
        for name, info in sorted(tensors.items())
        if len(info.shape) == 2 and kind_of(name, False) == "embedding" and _may_be_rows(name)
    }
    if not rows:
        return None
    vocabulary = text_part(config).get("vocab_size")
    most = vocabulary if vocabulary in rows.values() else max(rows.values())
    return next(name for name, size in rows.items() if size == most)


def has_token_rows(name: str, shape: tuple[int, ...], rows: int | None) -> bool:
    """Whether a tensor has one row (or, a bias, one number) a token."""
    if rows is None or not shape or shape[0] != rows or not _may_be_rows(name):
        return False
    words = name.split(".")
    return kind_of(name, False) in ("embedding", "head") and "dense" not in words and "transform" not in words


def _may_be_rows(name: str) -> bool:
    return not any(_NOT_ROWS.search(word) for word in name.lower().split("."))


def _split(name: str) -> tuple[str, int | None, str]:
    """A name around its outermost number."""
    words = name.split(".")
    for index, word in enumerate(words):
        if word.isdecimal():
            return ".".join(words[:index]), int(word), ".".join(words[index + 1 :])
    return name, None, ""


def _all_sizes(config: Mapping[str, Any]) -> list[int]:
    """Every number of layers that a config names, for all of its parts."""
    parts = [config, *(config[key] for key in _INNER if isinstance(config.get(key), dict))]
    keys = (*LAYER_KEYS, *_FURTHER_KEYS)
    return [part[key] for part in parts for key in keys if isinstance(part.get(key), int)]


def _gaps(numbers: Mapping[str, set[int]]) -> str:
    """What numbers there are, where they make no stack."""
    found = [f"{sorted(each)[:4]} in {prefix}" for prefix, each in sorted(numbers.items())]
    return ", ".join(found[:3]) or "none"
