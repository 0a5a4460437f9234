"""The result's ``config.json``: the donor's, with what the merge changed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from attar.merging.planning.naming import LAYER_KEYS, Stack, layer_count, text_part
from attar.merging.rows import Piece

_TYPES = ("torch_dtype", "dtype")
_NOT_BY_LAYER = ("architectures", "mrope_section")
_NOT_BY_LAYER_ENDINGS = ("_id", "_ids", "_token", "_tokens", "_languages", "_labels")


def output_config(
    donor: Mapping[str, Any],
    dtype: str | None,
    pieces: Mapping[str, Sequence[Piece]],
    *,
    rows: int | None = None,
    untied: bool = False,
) -> dict[str, Any]:
    """A new config; the donor's is not changed.

    Args:
        donor: config of the base model, else of the first.
        dtype: torch's name of the type that is written; None: of several, and the config says none.
        pieces: slices by stack, as the tensor map found them.
        rows: of the embedding, where a vocabulary was built.
        untied: the result has a head of its own although the donor had none.
    """
    config: dict[str, Any] = copy.deepcopy(dict(donor))
    config.pop("quantization_config", None)
    for key in _TYPES:
        config.pop(key, None)
    if dtype is not None:
        config["dtype"] = dtype
    text = _text(config)
    for key in _TYPES:
        if text is not config and key in text and dtype is not None:
            text[key] = dtype
    for parts in pieces.values():
        if any(start.source.layers is not None for piece in parts for start in piece.starts):
            _set_layers(config, donor, parts)
    for part in (config, text):
        if rows is not None and "vocab_size" in part:
            part["vocab_size"] = rows
    if untied:
        config["tie_word_embeddings"] = False
        if "tie_word_embeddings" in text:
            text["tie_word_embeddings"] = False
    return config


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """What a config says of its language model, to be changed."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _set_layers(config: dict[str, Any], donor: Mapping[str, Any], parts: Sequence[Piece]) -> None:
    """The number of layers, and every list with an entry a layer."""
    stack = parts[0].stack
    keys = _count_keys(stack, config)
    own = layer_count(donor)
    count = sum(piece.length for piece in parts)
    for part in (config, _text(config)):
        for key, value in list(part.items()):
            if key in keys and isinstance(value, int):
                part[key] = count
            elif isinstance(value, list) and own is not None and len(value) == own and _by_layer(key):
                part[key] = _entries(key, donor, parts, value)


def _count_keys(stack: Stack, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys that hold a stack's number of layers."""
    text = text_part(config)
    for word, keys in (
        ("decoder", ("num_decoder_layers", "decoder_layers")),
        ("encoder", ("encoder_layers",)),
    ):
        if word in stack.prefix.split(".") and any(key in text for key in keys):
            return keys
    return LAYER_KEYS


def _by_layer(key: str) -> bool:
    return key not in _NOT_BY_LAYER and not key.endswith(_NOT_BY_LAYER_ENDINGS)


def _entries(key: str, donor: Mapping[str, Any], parts: Sequence[Piece], own: list[Any]) -> list[Any]:
    """A per-layer list for the slices: of each the donor's entries where the donor is in it, else those of
    its first source."""
    entries: list[Any] = []
    for piece in parts:
        start = next((each for each in piece.all() if each.member.view.config is donor), piece.all()[0])
        listed = text_part(start.member.view.config).get(key)
        source = listed if isinstance(listed, list) and len(listed) >= start.first + piece.length else own
        entries += [source[(start.first + index) % len(source)] for index in range(piece.length)]
    return entries
