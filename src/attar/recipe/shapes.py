"""The shape of a model, and of what a stage makes of it, for the estimates: from headers and settings."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from attar.checkpoint.geometry import geometry
from attar.checkpoint.units import byte_count
from attar.pruning.settings import speed_factor
from attar.recipe.schema import StageEntry
from attar.recipe.settings import plain

if TYPE_CHECKING:
    from attar.checkpoint.open import Checkpoint

_BLOCK = re.compile(r"(?:^|\.)(\d+)\.")
_ATTENTION = re.compile(r"attn|attention")


@dataclass(frozen=True)
class Shape:
    """A model's size.

    Args:
        mlp: parameters of all other matrices in blocks.
        outside: parameters outside the blocks (embeddings, head, norms).
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
    """The shape of a checkpoint, from its headers and config."""
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
    sizes = geometry(checkpoint.config, "bfloat16")
    hidden, vocabulary = sizes.hidden or 1, sizes.vocabulary or 1
    return Shape(attention, mlp, outside, max(layers, 1), hidden, vocabulary, float(checkpoint.nbytes))


def after(entry: StageEntry, shape: Shape) -> Shape:
    """The shape of a stage's result."""
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
        smaller = _pruned(settings, shape)
        return replace(smaller, bytes=smaller.parameters * density)
    if entry.stage == "quantize":
        return replace(shape, bytes=_quantized(settings, shape))
    if entry.stage == "export" and getattr(settings, "format", "") == "dense":
        return replace(
            shape, bytes=shape.parameters * (4 if getattr(settings, "dtype", "") == "float32" else 2)
        )
    return shape


_NESTED = ("distill", "recover", "prune", "quantize")  # stages whose settings classes hold others


def flat_settings(entry: StageEntry) -> Any:
    """A stage's settings with every option as an attribute."""
    settings = entry.settings
    return SimpleNamespace(**plain(settings)) if entry.stage in _NESTED else settings


def _pruned(settings: Any, shape: Shape) -> Shape:
    """The shape without the units that go; zeros leave it as it is."""
    method, keep = getattr(settings, "method", ""), 1.0 - getattr(settings, "ratio", 0.0)
    if size := byte_count("size", getattr(settings, "size", "")):
        keep = min(size / shape.bytes, 1.0)
    elif speed := getattr(settings, "speed", ""):
        keep = 1.0 / speed_factor(speed)  # decoding reads all weights once a token
    if method == "heads":
        return replace(shape, attention=shape.attention * keep)
    if method == "query-heads":  # q and o, of whose sizes the header says only the sum with k and v
        going = min(2.0 * shape.layers * shape.hidden**2, shape.attention) * (1.0 - keep)
        return replace(shape, attention=shape.attention - going)
    if method == "neurons":
        return replace(shape, mlp=shape.mlp * keep)
    blocks = replace(shape, attention=shape.attention * keep, mlp=shape.mlp * keep)
    if method == "layers":
        return replace(blocks, layers=max(round(shape.layers * keep), 1))
    if method == "hidden":
        return replace(blocks, outside=shape.outside * keep, hidden=round(shape.hidden * keep))
    if method == "mixed":  # a fraction of all parameters, which blocks give up first
        going = min(shape.parameters * (1.0 - keep) / shape.blocks, 1.0)
        return replace(shape, attention=shape.attention * (1 - going), mlp=shape.mlp * (1 - going))
    return shape


def _layers(settings: Any, shape: Shape) -> int:
    layers = int(getattr(settings, "layers", 0))
    return min(layers, shape.layers) if layers else max(int(shape.layers * settings.keep_layers), 1)


def _quantized(settings: Any, shape: Shape) -> float:
    """Bytes of the codes, of a 16-bit scale per group, and of the unquantized tensors."""
    digits = re.match(r"W(\d+)", getattr(settings, "scheme", "W16"))
    bits = int(digits[1]) if digits else 16
    wanted = getattr(settings, "group_size", 0)
    group = 64 if wanted < 0 else wanted or shape.hidden  # -1 takes what fits, most often 64 or 128
    outside = 1.0 if getattr(settings, "embedding_bits", 0) == 8 else 2.0
    return shape.blocks * (bits / 8 + 2 / group) + shape.outside * outside
