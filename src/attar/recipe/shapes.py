"""The shape of a model, and of what a stage makes of it, for the estimates: from headers and settings."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from attar.checkpoint.geometry import geometry
from attar.checkpoint.open import Checkpoint, open_checkpoint
from attar.checkpoint.units import byte_count, size_limit
from attar.deployment.settings import ExportSettings
from attar.distillation.head_settings import TrainHeadSettings
from attar.distillation.settings import DistillSettings
from attar.distillation.student_settings import StudentSettings
from attar.pruning.settings import PruneSettings, speed_factor
from attar.quantization.settings import QuantizeSettings, StorageSettings
from attar.recipe.schema import StageEntry

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

    @property
    def inner(self) -> float:
        """Width inside the MLP, from the parameters of gate, up and down."""
        return max(self.mlp / self.layers / (3 * self.hidden), 1.0)

    @property
    def linears(self) -> tuple[tuple[float, float, float], ...]:
        """(how many, outputs, inputs) of all Linears: q, k, v, o; gate, up; down."""
        layers, hidden, inner = float(self.layers), float(self.hidden), self.inner
        return (4 * layers, hidden, hidden), (2 * layers, inner, hidden), (layers, hidden, inner)

    def scaled(self, attention: float = 1.0, mlp: float = 1.0, outside: float = 1.0, **sizes: int) -> Shape:
        """The shape with these fractions of its parameters, and the bytes that belong to them."""
        smaller = replace(
            self, attention=self.attention * attention, mlp=self.mlp * mlp, outside=self.outside * outside
        )
        density = self.bytes / max(self.parameters, 1)
        return replace(smaller, bytes=smaller.parameters * density, **sizes)


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
    match entry.settings:
        case TrainHeadSettings(makes_model=True):
            return shape
        case TrainHeadSettings(head=head, options=options):
            return head_shape(head, options, shape)
        case DistillSettings(student=StudentSettings(student=path)) if path:
            return shape_of(open_checkpoint(path))
        case DistillSettings(student=student):
            return _to_size(student.size, shape) if student.size else _cut(student, shape)
        case PruneSettings(method=method, options=options):
            return _pruned(method, options, shape)
        case QuantizeSettings(storage=storage):
            return replace(shape, bytes=_quantized(storage, shape))
        case ExportSettings() as settings:
            return replace(shape, bytes=_exported(settings, shape))
    return shape


def head_shape(head: str, options: Any, shape: Shape) -> Shape:
    """The shape of a draft head: its output matrices, and K residual blocks (Medusa) or a layer."""
    matrices, inside = 1, shape.blocks / shape.layers
    if head == "medusa":
        matrices = 1 if options.shared_head else options.drafts
        inside = options.drafts * options.residual_layers * float(shape.hidden) ** 2
    outside = float(matrices * (options.draft_vocabulary or shape.vocabulary) * shape.hidden)
    return Shape(0.0, inside, outside, 1, shape.hidden, shape.vocabulary, 2 * (inside + outside))


def _pruned(method: str, options: Any, shape: Shape) -> Shape:
    """The shape without the units that go; zeros leave it as it is."""
    keep = 1.0 - getattr(options, "ratio", 0.0)
    if size := byte_count("size", getattr(options, "size", "")):
        keep = min(size / shape.bytes, 1.0)
    elif speed := getattr(options, "speed", ""):
        keep = 1.0 / speed_factor(speed)  # decoding reads all weights once a token
    match method:
        case "heads":
            return shape.scaled(attention=keep)
        case "query-heads":  # q and o, of whose sizes the header says only the sum with k and v
            share = min(2.0 * shape.layers * shape.hidden**2 / shape.attention, 1.0)
            return shape.scaled(attention=1.0 - share * (1.0 - keep))
        case "neurons":
            return shape.scaled(mlp=keep)
        case "layers":
            return shape.scaled(keep, keep, layers=max(round(shape.layers * keep), 1))
        case "hidden":
            return shape.scaled(keep, keep, keep, hidden=round(shape.hidden * keep))
        case "mixed":  # a fraction of all parameters, which blocks give up first
            left = 1.0 - min(shape.parameters * (1.0 - keep) / shape.blocks, 1.0)
            return shape.scaled(left, left)
    return shape


def _cut(student: StudentSettings, shape: Shape) -> Shape:
    """The student of these layers and widths."""
    layers = _layers(student, shape)
    hidden = min(student.hidden or shape.hidden, shape.hidden)
    heads = student.heads / shape.heads if student.heads and shape.heads else 1.0
    neurons = student.neurons / shape.inner if student.neurons else 1.0
    if student.width:  # heads and MLP in proportion
        hidden, heads, neurons = student.width, student.width / shape.hidden, student.width / shape.hidden
    narrow, heads = hidden / shape.hidden, min(heads, 1.0)
    kept = narrow * layers / shape.layers
    sizes = {"layers": layers, "hidden": hidden, "heads": round(shape.heads * heads)}
    return shape.scaled(kept * heads, kept * min(neurons, 1.0), narrow, **sizes)


def _to_size(size: str, shape: Shape) -> Shape:
    """The student of a size: layers go first, down to half of them, then all widths."""
    kind, limit = size_limit("size", size)
    wanted = limit if kind == "parameters" else shape.parameters * limit / shape.bytes
    kept = max((wanted - shape.outside) / shape.blocks, 0.5)
    layers = max(int(shape.layers * min(kept, 1.0)), 1)
    shallower = shape.scaled(layers / shape.layers, layers / shape.layers, layers=layers)
    narrow = min(math.sqrt(wanted / shallower.parameters), 1.0)
    sizes = {"hidden": round(shape.hidden * narrow), "heads": round(shape.heads * narrow)}
    return shallower.scaled(narrow**2, narrow**2, narrow**2, **sizes)


def _layers(student: StudentSettings, shape: Shape) -> int:
    """Layers of the student: a number, as many as the map names, or a fraction of the teacher's."""
    numbers = student.layer_map.split(",")
    layers = len(numbers) if all(map(str.isdecimal, numbers)) else student.layers
    keep = student.keep_layers or (1.0 if student.is_narrower else 0.5)
    return min(layers, shape.layers) if layers else max(int(shape.layers * keep), 1)


def bits_of(storage: StorageSettings) -> int:
    """Bits of a code, by the scheme's name."""
    digits = re.match(r"W(\d+)", storage.scheme)
    return int(digits[1]) if digits else 16


def _quantized(storage: StorageSettings, shape: Shape) -> float:
    """Bytes of the codes, of a 16-bit scale per group, and of the unquantized tensors."""
    bits = bits_of(storage)
    group = 64 if storage.group_size < 0 else storage.group_size or shape.hidden  # -1: most often 64 or 128
    outside = 1.0 if storage.embedding_bits == 8 else 2.0
    return shape.blocks * (bits / 8 + 2 / group) + shape.outside * outside


def _exported(settings: ExportSettings, shape: Shape) -> float:
    """Bytes of a dense checkpoint, or of a GGUF file with its scales."""
    if settings.format == "dense":
        return shape.parameters * (4 if settings.dtype == "float32" else 2)
    digits = re.match(r"I?Q(\d)", settings.type)
    return shape.parameters * (int(digits[1]) + 0.5) / 8 if digits else shape.bytes
