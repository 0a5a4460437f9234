"""The shape of a model, and of what a stage makes of it, for the estimates: from headers and settings."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from attar.checkpoint.geometry import geometry
from attar.checkpoint.open import Checkpoint, open_checkpoint
from attar.checkpoint.units import byte_count, size_limit
from attar.pruning.settings import speed_factor
from attar.recipe.schema import StageEntry
from attar.recipe.settings import plain

_BLOCK = re.compile(r"(?:^|\.)(\d+)\.")
_ATTENTION = re.compile(r"attn|attention")


@dataclass(frozen=True)
class Shape:
    """A model's size.

    Args:
        mlp: parameters of all other matrices in blocks.
        outside: parameters outside the blocks (embeddings, head, norms).
        heads: of a layer; 0: the config does not say.
    """

    attention: float
    mlp: float
    outside: float
    layers: int
    hidden: int
    vocabulary: int
    bytes: float
    heads: int = 0

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
    weights = (attention, mlp, outside, max(layers, 1), hidden, vocabulary)
    return Shape(*weights, float(checkpoint.nbytes), sizes.heads or 0)


def after(entry: StageEntry, shape: Shape) -> Shape:
    """The shape of a stage's result."""
    settings = flat_settings(entry)
    density = shape.bytes / max(shape.parameters, 1)
    if entry.stage == "distill":
        if settings.head != "none":
            return head_shape(settings, shape)
        if settings.student:
            return shape_of(open_checkpoint(settings.student))
        smaller = _to_size(settings, shape) if settings.size else _cut(settings, shape)
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
    if entry.stage == "export" and (digits := re.match(r"I?Q(\d)", getattr(settings, "type", ""))):
        return replace(shape, bytes=shape.parameters * (int(digits[1]) + 0.5) / 8)  # GGUF, with scales
    return shape


def head_shape(settings: Any, shape: Shape) -> Shape:
    """The shape of a draft head: its output matrices, and K residual blocks (Medusa) or a layer."""
    rows = getattr(settings, "draft_vocabulary", 0) or shape.vocabulary
    matrices = 1
    inside = shape.blocks / shape.layers
    if settings.head == "medusa":
        matrices = 1 if settings.shared_head else settings.drafts
        inside = settings.drafts * settings.residual_layers * float(shape.hidden) ** 2
    outside = float(matrices * rows * shape.hidden)
    return replace(
        shape, attention=0.0, mlp=inside, outside=outside, layers=1, bytes=2 * (inside + outside), heads=0
    )


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


def _cut(settings: Any, shape: Shape) -> Shape:
    """The student of these layers and widths."""
    layers = _layers(settings, shape)
    kept, inner = layers / shape.layers, shape.mlp / shape.layers / (3 * shape.hidden)
    hidden = min(settings.hidden or shape.hidden, shape.hidden)
    heads = settings.heads / shape.heads if settings.heads and shape.heads else 1.0
    neurons = settings.neurons / inner if settings.neurons else 1.0
    if settings.width:  # heads and MLP in proportion
        hidden, heads, neurons = settings.width, settings.width / shape.hidden, settings.width / shape.hidden
    narrow = hidden / shape.hidden
    return replace(
        shape,
        attention=shape.attention * kept * narrow * min(heads, 1.0),
        mlp=shape.mlp * kept * narrow * min(neurons, 1.0),
        outside=shape.outside * narrow,
        layers=layers,
        hidden=hidden,
        heads=round(shape.heads * min(heads, 1.0)),
    )


def _to_size(settings: Any, shape: Shape) -> Shape:
    """The student of a size: whole layers go first, down to half of them, then all widths."""
    kind, limit = size_limit("size", settings.size)
    wanted = limit if kind == "parameters" else shape.parameters * limit / shape.bytes
    kept = max((wanted - shape.outside) / shape.blocks, 0.5)
    layers = max(int(shape.layers * min(kept, 1.0)), 1)
    kept = layers / shape.layers
    shallower = replace(shape, attention=shape.attention * kept, mlp=shape.mlp * kept, layers=layers)
    narrow = min(math.sqrt(wanted / shallower.parameters), 1.0)
    return replace(
        shallower,
        attention=shallower.attention * narrow**2,
        mlp=shallower.mlp * narrow**2,
        outside=shape.outside * narrow**2,
        hidden=round(shape.hidden * narrow),
        heads=round(shape.heads * narrow),
    )


def _layers(settings: Any, shape: Shape) -> int:
    """Layers of the student: a number, as many as the map names, or a fraction of the teacher's."""
    numbers = settings.layer_map.split(",")
    layers = len(numbers) if all(map(str.isdecimal, numbers)) else int(settings.layers)
    narrower = settings.heads or settings.neurons or settings.hidden
    keep = settings.keep_layers or (1.0 if narrower else 0.5)
    return min(layers, shape.layers) if layers else max(int(shape.layers * keep), 1)


def _quantized(settings: Any, shape: Shape) -> float:
    """Bytes of the codes, of a 16-bit scale per group, and of the unquantized tensors."""
    digits = re.match(r"W(\d+)", getattr(settings, "scheme", "W16"))
    bits = int(digits[1]) if digits else 16
    wanted = getattr(settings, "group_size", 0)
    group = 64 if wanted < 0 else wanted or shape.hidden  # -1 takes what fits, most often 64 or 128
    outside = 1.0 if getattr(settings, "embedding_bits", 0) == 8 else 2.0
    return shape.blocks * (bits / 8 + 2 / group) + shape.outside * outside
