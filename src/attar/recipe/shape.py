"""The few numbers of a model that decide how long and how large a stage will be, from headers alone."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from attar.recipe.settings import plain

if TYPE_CHECKING:
    from attar.checkpoint.open import Checkpoint
    from attar.recipe.schema import StageEntry

_BLOCK = re.compile(r"(?:^|\.)(\d+)\.")
_ATTENTION = re.compile(r"attn|attention")
_WIDTH = ("hidden_size", "n_embd", "d_model", "dim")


@dataclass(frozen=True)
class Shape:
    """A model in numbers.

    Args:
        attention: parameters of all attention layers.
        mlp: parameters of all other matrices inside blocks.
        outside: parameters outside the blocks (embeddings, head, norms) as they take part in a forward pass.
        layers: number of blocks.
        hidden: width of the hidden state.
        vocabulary: number of tokens.
        bytes: of the stored tensors.
    """

    attention: float
    mlp: float
    outside: float
    layers: int
    hidden: int
    vocabulary: int
    bytes: float

    @property
    def blocks(self) -> float:
        """Parameters inside the blocks."""
        return self.attention + self.mlp

    @property
    def parameters(self) -> float:
        """All parameters."""
        return self.blocks + self.outside


def shape_of(checkpoint: Checkpoint) -> Shape:
    """Read a checkpoint's shape from its headers and config."""
    attention = mlp = outside = 0.0
    layers = 0
    for name, info in checkpoint.tensors.items():
        # a packed tensor holds eight 4-bit or four 8-bit codes in a number: near enough for an estimate
        count = math.prod(info.shape) * (8 if name.endswith("weight_packed") else 1)
        block = _BLOCK.search(name)
        if block is None:
            outside += count
            continue
        layers = max(layers, int(block[1]) + 1)
        if _ATTENTION.search(name):
            attention += count
        else:
            mlp += count
    config = checkpoint.config
    hidden = next((int(config[key]) for key in _WIDTH if isinstance(config.get(key), int)), 1)
    vocabulary = config.get("vocab_size")
    return Shape(
        attention,
        mlp,
        outside,
        max(layers, 1),
        hidden,
        vocabulary if isinstance(vocabulary, int) else 1,
        float(checkpoint.nbytes),
    )


def after(entry: StageEntry, shape: Shape) -> Shape:
    """The shape of what a stage will make."""
    settings = flat_settings(entry)
    density = shape.bytes / max(shape.parameters, 1)
    if entry.stage == "distill":
        kept = _layers(settings, shape) / shape.layers
        narrow = (getattr(settings, "width", 0) or shape.hidden) / shape.hidden
        smaller = replace(
            shape,
            attention=shape.attention * kept * narrow**2,
            mlp=shape.mlp * kept * narrow**2,
            outside=shape.outside * narrow,
            layers=_layers(settings, shape),
            hidden=round(shape.hidden * narrow),
        )
        return replace(smaller, bytes=smaller.parameters * density)
    if entry.stage == "prune":
        keep = 1.0 - getattr(settings, "ratio", 0.0)
        part = "attention" if getattr(settings, "method", "") == "heads" else "mlp"
        smaller = replace(shape, **{part: getattr(shape, part) * keep})
        return replace(smaller, bytes=smaller.parameters * density)
    if entry.stage == "quantize":
        return replace(shape, bytes=_quantized(settings, shape))
    if entry.stage == "export" and getattr(settings, "format", "") == "dense":
        return replace(
            shape, bytes=shape.parameters * (4 if getattr(settings, "dtype", "") == "float32" else 2)
        )
    return shape


def flat_settings(entry: StageEntry) -> Any:
    """A stage's settings with every option as an attribute."""
    settings = entry.settings
    return SimpleNamespace(**plain(settings)) if entry.stage == "quantize" else settings


def _layers(settings: Any, shape: Shape) -> int:
    asked = int(getattr(settings, "layers", 0))
    return min(asked, shape.layers) if asked else max(int(shape.layers * settings.keep_layers), 1)


def _quantized(settings: Any, shape: Shape) -> float:
    """Bytes of the codes, one 16-bit scale a group, and what stays as it is."""
    digits = re.match(r"W(\d+)", getattr(settings, "scheme", "W16"))
    bits = int(digits[1]) if digits else 16
    wanted = getattr(settings, "group_size", 0)
    group = 64 if wanted < 0 else wanted or shape.hidden  # -1 takes what fits, most often 64 or 128
    outside = 1.0 if getattr(settings, "embedding_bits", 0) == 8 else 2.0
    return shape.blocks * (bits / 8 + 2 / group) + shape.outside * outside
