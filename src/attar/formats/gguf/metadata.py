"""A model's config as metadata of a GGUF file: ``general.*`` and the architecture's keys. The way back is in
config.py.

The writer of a file adds the tokenizer's keys, ``general.file_type`` and ``general.quantization_version``.
Differs from llama.cpp's converter: widths of heads, size of the vocabulary, rotary settings and windows are
written for every family, also where its loader has the same default.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from attar.formats.gguf.architecture import (
    NEXTN,
    Architecture,
    Sizes,
    SlidingWindow,
    attends,
    number,
    sizes,
    usual_pattern,
    window,
)
from attar.formats.gguf.rope import read_rope, rope_metadata
from attar.formats.gguf.tensor_map import architecture, expected_placements, nextn_count


def metadata(config: Mapping[str, Any], name: str, names: Collection[str] = ()) -> dict[str, Any]:
    """``general.*`` and the architecture's keys, in a fixed order.

    Args:
        name: ``general.name``.
        names: of the checkpoint's tensors, which say how many blocks predict further tokens.

    Raises:
        ModelError: as :func:`architecture`.
    """
    arch = architecture(config)
    measured = sizes(config, arch)
    measured = replace(measured, nextn=nextn_count(arch, measured.layers, names))
    count = sum(math.prod(placement.shape) for placement in expected_placements(config, names))
    general = {
        "general.architecture": arch.arch,
        "general.type": "model",
        "general.name": name,
        "general.size_label": size_label(count),
    }
    keys = _dimensions(arch, measured, float(number(config, arch, "epsilon")))
    if arch.layer_types and not arch.attention_interval:
        marks = attends(config, arch, measured.layers)
        keys["attention.head_count_kv"] = [measured.kv_heads if mark else 0 for mark in marks]
    rope = read_rope(config, arch, measured)
    if rope:
        keys |= rope_metadata(rope, arch, measured.context)
    keys |= _window_keys(arch, window(config, arch, measured.layers), measured.layers)
    for key, source in arch.extras:
        value = config.get(source, arch.defaults.get(source))
        if value is not None:
            keys[key] = value if isinstance(value, bool) else float(value)
    keys |= {NEXTN: measured.nextn} if measured.nextn else {}
    keys |= dict(arch.fixed) | dict(arch.more_keys(config, measured))
    return general | {f"{arch.arch}.{key}": value for key, value in keys.items()}


def _dimensions(arch: Architecture, measured: Sizes, epsilon: float) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "block_count": measured.layers + measured.nextn,
        "context_length": measured.context,
        "embedding_length": measured.hidden,
        "feed_forward_length": measured.ff,
        "attention.head_count": measured.heads,
        "attention.head_count_kv": measured.kv_heads,
        "attention.key_length": measured.head,
        "attention.value_length": measured.head,
        "vocab_size": measured.vocabulary,
    }
    if arch.attention_free:
        keys = {key: value for key, value in keys.items() if value or not key.startswith("attention.")}
        keys["attention.head_count"] = 0
    name = "attention.layer_norm_epsilon" if arch.layer_norm else "attention.layer_norm_rms_epsilon"
    keys |= {
        count.gguf: measured.of(count.size)
        for count in arch.counts
        if count.gguf and (measured.of(count.size) or count.zero)
    }
    inner = {"ssm.inner_size": measured.of("ssm_inner")} if arch.recurrent else {}
    return keys | {name: epsilon} | inner | (_latent_dimensions(measured) if arch.latent else {})


def _latent_dimensions(measured: Sizes) -> dict[str, Any]:
    """The widths of MLA's one shared key and value, and of the keys and values of each head."""
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": measured.of("kv_latent"),
        "attention.value_length": measured.of("kv_rank"),
        "attention.key_length_mla": measured.head,
    }


def _window_keys(arch: Architecture, seen: SlidingWindow | None, layers: int) -> dict[str, Any]:
    """The window, and its blocks where llama.cpp assumes others."""
    if arch.window is None:
        return {}
    if seen is None:
        return {"attention.sliding_window": 0} if arch.family == "phi3" else {}
    keys: dict[str, Any] = {"attention.sliding_window": seen.tokens}
    usual = isinstance(arch.window, int) and list(seen.blocks) == usual_pattern(arch.window, layers)
    if arch.window != "all" and not usual:
        keys["attention.sliding_window_pattern"] = list(seen.blocks)
    return keys


def size_label(count: int) -> str:
    """A number of parameters with at least two digits: 1.1B, 135M."""
    powers = {"T": 12, "B": 9, "M": 6, "K": 3}
    letter = next((letter for letter, power in powers.items() if count > 10**power), "K")
    scaled = count / 10 ** powers[letter]
    digits = len(str(round(scaled)).lstrip("0"))
    return f"{scaled:.{max(2 - digits, 0)}f}{letter}"


def notes(config: Mapping[str, Any]) -> list[str]:
    """How llama.cpp computes differently from transformers with the file, in sentences."""
    arch = architecture(config)
    measured = sizes(config, arch)
    sentences = list(arch.differences(config, measured))
    seen = window(config, arch, measured.layers)
    if seen and not arch.window_applied and seen.tokens < measured.context:
        sentences.append(
            f"llama.cpp does not apply the sliding window: texts beyond {seen.tokens} tokens differ"
        )
    if config.get(arch.activation) == "gelu":
        sentences.append("llama.cpp computes gelu by its tanh approximation")
    rope = read_rope(config, arch, measured)
    if rope and rope.kind == "yarn" and rope.settings.get("truncate") is False:
        sentences.append("llama.cpp rounds yarn's two boundaries to whole dimensions, transformers does not")
    if rope and rope.kind == "longrope":
        sentences.append(
            f"llama.cpp takes the long rope factors where a context over {rope.original} is allocated, "
            "transformers where the text is longer than that"
        )
    return sentences
