"""The metadata of a GGUF file that follows from a model's config: ``general.*`` and the architecture's
keys.

The tokenizer's keys, ``general.file_type`` and ``general.quantization_version`` are added by who writes the
file.

Differs from llama.cpp's converter: widths of heads, size of the vocabulary, rotary settings and windows are
written for every family, also where its loader would take the same number by default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attar.formats.gguf.architectures import architecture, expected
from attar.formats.gguf.parts import Architecture
from attar.formats.gguf.rope import read_rope, rope_metadata
from attar.formats.gguf.sizes import Sizes, SlidingWindow, number, sizes, usual_pattern, window


def metadata(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """``general.*`` and the architecture's keys, in a fixed order.

    Args:
        config: content of config.json.
        name: of the model, for people.

    Raises:
        ModelError: as :func:`architecture`.
    """
    found = architecture(config)
    measured = sizes(config, found)
    count = sum(math.prod(each.shape) for each in expected(config))
    general = {
        "general.architecture": found.written,
        "general.type": "model",
        "general.name": name,
        "general.size_label": size_label(count),
    }
    keys = _dimensions(found, measured, float(number(config, found, "epsilon")))
    rope = read_rope(config, found, measured)
    if rope:
        keys |= rope_metadata(rope, found, measured.context)
    keys |= _window_keys(found, window(config, found, measured.layers), measured.layers)
    for key, source in found.extras:
        value = config.get(source, found.defaults.get(source))
        if value is not None:
            keys[key] = value if isinstance(value, bool) else float(value)
    return general | {f"{found.written}.{key}": value for key, value in keys.items()}


def _dimensions(found: Architecture, measured: Sizes, epsilon: float) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "block_count": measured.layers,
        "context_length": measured.context,
        "embedding_length": measured.hidden,
        "feed_forward_length": measured.ff,
        "attention.head_count": measured.heads,
        "attention.head_count_kv": measured.kv_heads,
        "attention.key_length": measured.head,
        "attention.value_length": measured.head,
        "vocab_size": measured.vocabulary,
    }
    name = "attention.layer_norm_epsilon" if found.layer_norm else "attention.layer_norm_rms_epsilon"
    return keys | {name: epsilon}


def _window_keys(found: Architecture, seen: SlidingWindow | None, layers: int) -> dict[str, Any]:
    """The window, and its blocks where they are not those that llama.cpp assumes."""
    if found.window is None:
        return {}
    if seen is None:
        return {"attention.sliding_window": 0} if found.family == "phi3" else {}
    keys: dict[str, Any] = {"attention.sliding_window": seen.tokens}
    usual = isinstance(found.window, int) and list(seen.blocks) == usual_pattern(found.window, layers)
    if found.window != "all" and not usual:
        keys["attention.sliding_window_pattern"] = list(seen.blocks)
    return keys


def size_label(count: int) -> str:
    """A number of parameters in two digits or more: 1.1B, 135M."""
    powers = {"T": 12, "B": 9, "M": 6, "K": 3}
    letter = next((letter for letter, power in powers.items() if count > 10**power), "K")
    scaled = count / 10 ** powers[letter]
    digits = len(str(round(scaled)).lstrip("0"))
    return f"{scaled:.{max(2 - digits, 0)}f}{letter}"


def notes(config: Mapping[str, Any]) -> list[str]:
    """Where llama.cpp, reading the file, departs from transformers; one sentence each."""
    found = architecture(config)
    measured = sizes(config, found)
    said = []
    seen = window(config, found, measured.layers)
    if seen and not found.window_applied and seen.tokens < measured.context:
        said.append(f"llama.cpp does not apply the sliding window: texts beyond {seen.tokens} tokens differ")
    if config.get(found.activation) == "gelu":
        said.append("llama.cpp computes gelu by its tanh approximation")
    rope = read_rope(config, found, measured)
    if rope and rope.kind == "longrope":
        said.append(
            f"llama.cpp takes the long rope factors where a context over {rope.original} is allocated, "
            "transformers where the text is longer than that"
        )
    return said
