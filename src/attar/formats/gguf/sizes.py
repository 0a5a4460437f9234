"""What a config says about a model's sizes and its sliding window, in one spelling for all families.

A key that is missing means what transformers takes for it; a key that is null means that the number follows
from others: the head's width is hidden / heads, KV heads are as many as heads, the MLP is four times as
wide as the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from attar.errors import ModelError
from attar.formats.gguf.parts import USUAL, Architecture


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, in elements; context in tokens."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    ff: int
    vocabulary: int
    context: int

    def of(self, name: str) -> int:
        """A size by the name that the table of parts gives it."""
        if name in ("q", "kv", "qkv"):
            counts = {"q": self.heads, "kv": self.kv_heads, "qkv": self.heads + 2 * self.kv_heads}
            return counts[name] * self.head
        return 2 * self.ff if name == "gate_up" else int(getattr(self, name))


@dataclass(frozen=True)
class SlidingWindow:
    """Sliding-window attention: in the blocks marked a token sees the last ``tokens`` tokens, itself too."""

    tokens: int
    blocks: tuple[bool, ...]


def key_of(architecture: Architecture, name: str) -> str:
    """How a family's config calls a number."""
    return architecture.keys.get(name, USUAL.get(name, name))


def number(config: Mapping[str, Any], architecture: Architecture, name: str) -> Any:
    """What the config says under a name, or what transformers takes where it says nothing."""
    key = key_of(architecture, name)
    return config[key] if key in config else architecture.defaults.get(name)


def sizes(config: Mapping[str, Any], architecture: Architecture) -> Sizes:
    """The sizes that a config says.

    Raises:
        ModelError: one is missing or no whole number, or they do not fit together.
    """
    hidden, heads = _whole(config, architecture, "hidden"), _whole(config, architecture, "heads")
    found = Sizes(
        layers=_whole(config, architecture, "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_whole(config, architecture, "kv_heads", heads),
        head=_whole(config, architecture, "head", hidden // heads),
        ff=_whole(config, architecture, "ff", 4 * hidden if architecture.family == "gpt2" else None),
        vocabulary=_whole(config, architecture, "vocabulary"),
        context=_whole(config, architecture, "context"),
    )
    _check(found, architecture)
    return found


def _whole(
    config: Mapping[str, Any], architecture: Architecture, name: str, otherwise: int | None = None
) -> int:
    value = number(config, architecture, name)
    value = otherwise if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(
            f"config of {architecture.family}: {key_of(architecture, name)} is {value!r}, but must be a "
            "whole number above 0",
            hint="GGUF has one such number for all blocks; check config.json",
        )
    return value


def _check(found: Sizes, architecture: Architecture) -> None:
    family = architecture.family
    if found.heads % found.kv_heads:
        raise ModelError(
            f"config of {family}: {found.heads} heads are no multiple of {found.kv_heads} KV heads"
        )
    if architecture.ropes and found.head % 2:
        raise ModelError(
            f"config of {family}: a head's width of {found.head} is odd; rotary needs an even one"
        )
    if architecture.square and found.heads * found.head != found.hidden:
        raise ModelError(
            f"{family}: GGUF's {architecture.written} has no width of a head of its own, so {found.heads} "
            f"heads of {found.head} in a width of {found.hidden} cannot be written",
            hint="such a model comes from removing heads; remove neurons or layers instead",
        )


def window(config: Mapping[str, Any], architecture: Architecture, layers: int) -> SlidingWindow | None:
    """The sliding window; None where no block has one."""
    kind = architecture.window
    tokens = number(config, architecture, "sliding_window")
    if kind is None or not tokens or (kind == "marked" and not config.get("use_sliding_window")):
        return None
    marked = config.get("layer_types")
    if kind == "all":
        blocks = (True,) * layers
    elif isinstance(marked, list):
        blocks = tuple(each == "sliding_attention" for each in marked)
    else:
        blocks = tuple(_usual(config, kind, layers))
    if len(blocks) != layers:
        raise ModelError(
            f"config of {architecture.family}: layer_types names {len(blocks)} blocks, the model has {layers}"
        )
    return SlidingWindow(int(tokens), blocks) if any(blocks) else None


def _usual(config: Mapping[str, Any], kind: str | int, layers: int) -> list[bool]:
    """Which blocks have the window where the config names none."""
    if kind == "marked":
        first = config.get("max_window_layers", 28)
        return [index >= first for index in range(layers)]
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or kind
    return usual_pattern(int(every), layers)


def usual_pattern(every: int, layers: int) -> list[bool]:
    """Every block has the window but each ``every``-th."""
    return [bool((index + 1) % every) for index in range(layers)]


def shortest(value: float) -> float:
    """The shortest decimal number that float32 keeps as this value: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
