"""Parse tensor names: stack of layers, layer, kind.

``model.layers.3.mlp.up_proj.weight`` belongs to layer 3 of the stack ``model.layers``: the outermost number
of a dotted name is the layer (inner numbers are experts, or the parts of a T5 block). The numbers of a stack
run from 0 without a gap; its last word is a usual name of a stack, or its size is a number of layers in the
config.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from attar.checkpoint.parts import part_of
from attar.errors import ModelError

LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Keys of a config for the number of layers, by family."""

_OTHER_LAYER_KEYS = ("encoder_layers", "decoder_layers", "num_decoder_layers", "depth")
_INNER_CONFIGS = ("text_config", "vision_config", "audio_config", "encoder", "decoder")

_STACK_WORD = re.compile(r"(layers?|h|blocks?|resblocks)$")
_BEFORE_LAYERS = re.compile(r"embed|^wte$|^wpe$|^shared$|^project_in$|^ln_pre$")
_NOT_OF_TOKENS = re.compile(r"position|^wpe$|pos_|token_type|segment|patch|rotary|type_embed")
_BUFFER = re.compile(r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias|position_ids|attention\.(masked_)?bias)$")


@dataclass(frozen=True)
class ModelStack:
    """Consecutive layers.

    Attributes:
        prefix: the name before the layer's number, without the dot; may be empty.
    """

    prefix: str
    count: int


@dataclass(frozen=True)
class TensorPosition:
    """A tensor inside a stack: ``local_name`` is its name inside the layer."""

    stack: ModelStack
    layer: int
    local_name: str


def find_stacks(names: Iterable[str], config: Mapping[str, Any], model: str) -> tuple[ModelStack, ...]:
    """The stacks of a model: stacks as large as the config's language model first, then by prefix.

    Args:
        names: of all tensors.
        config: content of ``config.json``.

    Raises:
        ModelError: there is no stack, or none of the size that the config gives.
    """
    numbers: dict[str, set[int]] = {}
    for name in names:
        prefix, number, _ = _split(name)
        if number is not None:
            numbers.setdefault(prefix, set()).add(number)
    sizes = {prefix: len(layers) for prefix, layers in numbers.items() if max(layers) == len(layers) - 1}
    known_sizes = _layer_counts(config)
    stacks = [
        ModelStack(prefix, size)
        for prefix, size in sorted(sizes.items())
        if _STACK_WORD.search(prefix.rpartition(".")[2]) or (size in known_sizes and size > 1)
    ]
    expected = layer_count(config)
    if expected is not None and not any(stack.count == expected for stack in stacks):
        actual = ", ".join(f"{s.count} in {s.prefix}" for s in stacks) or _incomplete(numbers)
        raise ModelError(
            f"{model}: config.json says {expected} layers, but the tensors' names have {actual}",
            hint="the checkpoint is incomplete, or its config is of another model",
        )
    if not stacks:
        raise ModelError(f"{model}: no layers found in the names of its tensors")
    return tuple(sorted(stacks, key=lambda stack: (stack.count != expected, stack.prefix)))


def position_of(name: str, stacks: Iterable[ModelStack]) -> TensorPosition | None:
    """A tensor's stack and layer; None outside the stacks."""
    prefix, number, local_name = _split(name)
    for stack in stacks:
        if number is not None and stack.prefix == prefix:
            return TensorPosition(stack, number, local_name)
    return None


def layer_name(prefix: str, layer: int, local_name: str) -> str:
    """The name of a layer's tensor."""
    return f"{prefix}.{layer}.{local_name}" if prefix else f"{layer}.{local_name}"


def layer_count(config: Mapping[str, Any]) -> int | None:
    """The number of layers of a config's language model, or None."""
    for part in (text_config(config), config):
        for key in LAYER_KEYS:
            value = part.get(key)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model."""
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
    """Whether a tensor outside the stacks is used before the layers; it is merged like the first slice."""
    words = name.lower().split(".")
    return kind_of(name, False) != "head" and any(_BEFORE_LAYERS.search(word) for word in words)


def is_buffer(name: str) -> bool:
    """Whether a tensor follows from the config; old checkpoints store such tensors."""
    return bool(_BUFFER.search(name))


def token_embedding(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Name of the matrix with one row a token, or None. Returns the first by name with as many rows as the
    config's vocabulary; where none has, with the most rows.

    Args:
        tensors: the tensors outside the stacks, by name.
        config: content of ``config.json``.
    """
    rows = {
        name: info.shape[0]
        for name, info in sorted(tensors.items())
        if len(info.shape) == 2 and kind_of(name, False) == "embedding" and _may_be_of_tokens(name)
    }
    if not rows:
        return None
    vocabulary = text_config(config).get("vocab_size")
    count = vocabulary if vocabulary in rows.values() else max(rows.values())
    return next(name for name, size in rows.items() if size == count)


def has_token_rows(name: str, shape: tuple[int, ...], rows: int | None) -> bool:
    """Whether a tensor has one row (a bias: one number) a token, of ``rows`` tokens."""
    if rows is None or not shape or shape[0] != rows or not _may_be_of_tokens(name):
        return False
    words = name.split(".")
    return kind_of(name, False) in ("embedding", "head") and "dense" not in words and "transform" not in words


def _may_be_of_tokens(name: str) -> bool:
    return not any(_NOT_OF_TOKENS.search(word) for word in name.lower().split("."))


def _split(name: str) -> tuple[str, int | None, str]:
    """The name before its outermost number, the number, and the name after it."""
    words = name.split(".")
    for index, word in enumerate(words):
        if word.isdecimal():
            return ".".join(words[:index]), int(word), ".".join(words[index + 1 :])
    return name, None, ""


def _layer_counts(config: Mapping[str, Any]) -> list[int]:
    """All numbers of layers in a config and its inner configs."""
    parts = [config, *(config[key] for key in _INNER_CONFIGS if isinstance(config.get(key), dict))]
    keys = (*LAYER_KEYS, *_OTHER_LAYER_KEYS)
    return [part[key] for part in parts for key in keys if isinstance(part.get(key), int)]


def _incomplete(numbers: Mapping[str, set[int]]) -> str:
    """The numbers in names that are no stack."""
    parts = [f"{sorted(layers)[:4]} in {prefix}" for prefix, layers in sorted(numbers.items())]
    return ", ".join(parts[:3]) or "none"
