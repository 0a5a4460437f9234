"""Which models can be written as GGUF, and which of their tensors stands where.

    found = architecture(config)                      refuses what llama.cpp would compute otherwise
    keys = metadata(config, "SmolLM2-135M")           metadata.py: general.* and <architecture>.*
    for placement in placements(config, checkpoint.tensors):
        tensor = placement.apply(checkpoint.load(placement.stored)) if placement.stored else placement.value

:mod:`attar.formats.gguf.hf_config` is the way back.

Differs from llama.cpp's converter: a tensor that the table does not know is an error, and so is a config that
llama.cpp cannot follow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from attar.errors import CheckpointError, ModelError, nearest
from attar.formats.gguf.families import ARCHITECTURES
from attar.formats.gguf.parts import Architecture, ModuleMapping
from attar.formats.gguf.placement import Placement, paired, sorted_groups
from attar.formats.gguf.rope import read_rope, rope_tensors
from attar.formats.gguf.sizes import Sizes, number, sizes, window

BUFFERS = (
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    "rotary_emb.inv_freq",
)
"""Endings of stored tensors that are no weights: old checkpoints keep masks and frequencies."""


def architecture(config: Mapping[str, Any]) -> Architecture:
    """The family of a config, checked.

    Raises:
        ModelError: GGUF or llama.cpp cannot express it; names the key or the family.
    """
    family = config.get("model_type")
    if "text_config" in config:
        raise ModelError(
            f"{family} is more than a language model, which is all that attar writes to GGUF",
            hint="save its language model alone",
        )
    if family not in ARCHITECTURES:
        raise ModelError(
            f"attar cannot write {family!r} as GGUF", hint=f"it can write {', '.join(sorted(ARCHITECTURES))}"
        )
    found = ARCHITECTURES[family]
    _check(config, found)
    return found


def _check(config: Mapping[str, Any], found: Architecture) -> None:
    for rule in found.rules:
        value = config.get(rule.key, rule.default)
        fits = isinstance(value, int | float) if rule.allowed is None else value in rule.allowed
        if not fits:
            wanted = "a number" if rule.allowed is None else " or ".join(map(str, rule.allowed))
            raise ModelError(
                f"config of {found.family}: {rule.key} is {value!r}, but llama.cpp's {found.written} knows "
                f"{wanted} only",
                hint="export to another format",
            )
    _check_tied(config, found)
    measured = sizes(config, found)
    _check_scale(config, found, measured)
    _check_turned(config, found, measured.layers)
    read_rope(config, found, measured)
    if not window(config, found, measured.layers) and found.window_needed:
        raise ModelError(
            f"config of {found.family}: no block has a sliding window; llama.cpp's {found.written} needs one",
            hint="export to another format",
        )


def _check_tied(config: Mapping[str, Any], found: Architecture) -> None:
    tied = _tied(config, found)
    if found.head == "never" and not tied:
        raise ModelError(f"{found.family}: GGUF's {found.written} has no head of its own, so it must be tied")
    if found.head_bias and tied:
        raise ModelError(f"{found.family}: GGUF's {found.written} has no tied head")


def _check_turned(config: Mapping[str, Any], found: Architecture, layers: int) -> None:
    """llama.cpp leaves each n-th block without rotary embedding, whatever the config says."""
    if not found.unturned:
        return
    usual = [int((index + 1) % found.unturned != 0) for index in range(layers)]
    every = config.get("no_rope_layer_interval", found.unturned)
    said = config.get("no_rope_layers") or [int((index + 1) % every != 0) for index in range(layers)]
    if said != usual:
        raise ModelError(
            f"config of {found.family}: no_rope_layers is {said}, but llama.cpp leaves out each "
            f"{found.unturned}th block alone",
            hint="this comes from removing layers; remove neurons or heads instead",
        )


def _check_scale(config: Mapping[str, Any], found: Architecture, measured: Sizes) -> None:
    """llama.cpp chooses the scale of queries by the number of blocks."""
    if not found.scale_by_layers:
        return
    scalar = number(config, found, "query_pre_attn_scalar")
    if not isinstance(scalar, int | float) or not math.isclose(scalar, query_scalar(found, measured)):
        raise ModelError(
            f"config of {found.family}: query_pre_attn_scalar is {scalar}, but llama.cpp computes with "
            f"{query_scalar(found, measured)} for {measured.layers} blocks of this width",
            hint="this comes from removing layers or heads of the largest model; remove neurons instead",
        )


def query_scalar(found: Architecture, measured: Sizes) -> int:
    """Gemma's ``query_pre_attn_scalar``, as llama.cpp has it."""
    whole = measured.layers == found.scale_by_layers
    return measured.hidden // measured.heads if whole else measured.head


def placements(config: Mapping[str, Any], stored: Mapping[str, Any]) -> list[Placement]:
    """Every tensor of the file, in its order, with where it comes from.

    Args:
        config: content of config.json.
        stored: the checkpoint's tensors by name; of each the ``shape`` is read.

    Raises:
        ModelError: as :func:`architecture`.
        CheckpointError: a tensor is missing, of another shape, or of no use; names it.
    """
    found = architecture(config)
    placed = [_resolve(each, found, stored) for each in expected(config)]
    used = frozenset(each.stored for each in placed)
    if _tied(config, found):
        used |= {f"{name}.weight" for name in found.heads_stored}
    for name in stored:
        if name not in used and not name.endswith(BUFFERS):
            raise CheckpointError(
                f"tensor {name!r} of the checkpoint has no place in a GGUF file of {found.family}",
                hint="the config does not speak of it; is it of another architecture?",
            )
    return placed


def _resolve(each: Placement, found: Architecture, stored: Mapping[str, Any]) -> Placement:
    """The placement with the name that the checkpoint uses: saved from the bare model it lacks the prefix."""
    if each.stored is None:
        return each
    names = [each.stored, each.stored.removeprefix(found.prefix)]
    leaf = each.stored.rsplit(".", 1)[1]
    if each.stored.rsplit(".", 1)[0] in found.heads_stored:
        names = [f"{name}.{leaf}" for name in found.heads_stored]
    name = next((name for name in names if name in stored), None)
    if name is None:
        close = nearest(each.stored, stored)
        raise CheckpointError(
            f"the checkpoint has no tensor {each.stored!r}",
            hint=f"is it {close!r}? The config says that the model is {found.family}" if close else None,
        )
    shape = tuple(stored[name].shape)
    if shape != each.stored_shape:
        raise CheckpointError(
            f"tensor {name!r} is {list(shape)}, but the config says {list(each.stored_shape)}",
            hint="GGUF has one width for all blocks, that of the config",
        )
    return replace(each, stored=name)


def expected(config: Mapping[str, Any]) -> list[Placement]:
    """The tensors that a config asks for, under transformers' usual names, whether they are there or not."""
    found = architecture(config)
    measured = sizes(config, found)
    rows = _orders(found, measured)
    listed = list(found.outer) + _head(config, found)
    outer = [each for part in listed for each in _tensors(config, found, measured, part, rows)]
    rope = read_rope(config, found, measured)
    made = [
        Placement(name, None, tuple(value.shape), matrix=False, value=value)
        for name, value in (rope_tensors(rope) if rope else {}).items()
    ]
    blocks = [
        each
        for index in range(measured.layers)
        for part in found.blocks
        for each in _tensors(config, found, measured, _in_block(part, index), rows)
    ]
    return outer + made + blocks


def _in_block(part: ModuleMapping, index: int) -> ModuleMapping:
    return replace(part, gguf=part.gguf.format(index), stored=part.stored.format(index))


def _orders(found: Architecture, measured: Sizes) -> dict[str, Tensor]:
    """Row orders, each made once."""
    orders = sorted({part.order for part in found.blocks if part.order})
    heads = {"q": measured.heads, "k": measured.kv_heads}
    return {
        order: paired(heads[order], measured.head)
        if order in heads
        else sorted_groups(measured.heads, measured.kv_heads, measured.head)
        for order in orders
    }


def _head(config: Mapping[str, Any], found: Architecture) -> list[ModuleMapping]:
    """The head, unless the embedding stands for it; a needed head is then a copy of the embedding."""
    shape = ("vocabulary", "hidden")
    if not _tied(config, found):
        return [ModuleMapping("output", found.heads_stored[0], shape, bias=found.head_bias)]
    embedding = next(part.stored for part in found.outer if part.gguf == "token_embd")
    return [ModuleMapping("output", embedding, shape)] if found.head == "needed" else []


def _tied(config: Mapping[str, Any], found: Architecture) -> bool:
    return bool(config.get("tie_word_embeddings", found.defaults.get("tie_word_embeddings", False)))


def _tensors(
    config: Mapping[str, Any],
    found: Architecture,
    measured: Sizes,
    part: ModuleMapping,
    rows: Mapping[str, Tensor],
) -> Iterator[Placement]:
    """Weight and bias of a part."""
    prefix = "" if part.stored in found.heads_stored else found.prefix
    stored, shape = f"{prefix}{part.stored}", tuple(measured.of(size) for size in part.shape)
    order = rows.get(part.order)
    yield Placement(
        f"{part.gguf}.weight",
        f"{stored}.weight",
        shape,
        transposed=part.transposed,
        rows=order,
        plus=part.plus,
        matrix=part.matrix,
    )
    if _biased(config, part):
        yield Placement(f"{part.gguf}.bias", f"{stored}.bias", shape[:1], rows=order, matrix=False)


def _biased(config: Mapping[str, Any], part: ModuleMapping) -> bool:
    return bool(config.get(part.bias, False)) if isinstance(part.bias, str) else part.bias
