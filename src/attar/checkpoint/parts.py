"""Parameters and bytes of a checkpoint, by part of the model, from headers alone.

A quantized weight is several stored tensors: codes, scales, zero points. They count as one weight, with its
parameters before quantization and the bytes of all its tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attar.checkpoint.mlx_folder import mlx_name
from attar.checkpoint.tensors import TensorInfo

if TYPE_CHECKING:
    from attar.checkpoint.open import Checkpoint

PARTS = ("embedding", "attention", "mlp", "norm", "head", "mtp", "other")
"""``mtp`` is the multi-token prediction head, whole."""

_RULES: tuple[tuple[str, str], ...] = (
    ("norm", r"norm|^ln(_|\d|$)"),
    (
        "head",
        r"^(lm_head|embed_out|score|classifier|qa_outputs|cls|predictions|vocab_(transform|projector))$",
    ),
    ("embedding", r"embed|^wte$|^wpe$"),
    ("attention", r"attn|attention"),
    ("mlp", r"mlp|ffn|feed_?forward|expert|moe|^fc\d|^fc_|^intermediate$|^output$|^w[123]$"),
)
"""Part, and a pattern for one component of a dotted tensor name; the first match decides."""

_GGUF = {
    "token_embd": "embedding",
    "position_embd": "embedding",
    "output": "head",
}
"""Parts by the first component of llama.cpp's names."""

_DERIVED = re.compile(r"^rope_(freqs|factors_\w+)\.weight$")
"""llama.cpp's tensors that follow from the config: bytes without parameters."""

AUXILIARY = re.compile(
    r"\.(weight_(scale|scale_inv|zero_point|shape|g_idx|global_scale)|(input|output|activation)_(scale|zero_point|global_scale)"
    r"|[qkv]_(scale|zero_point)|qzeros|scales|biases|g_idx|suh?|svh?|mcg|mul1"
    r"|weight\.(absmax|quant_map|nested_\w+|quant_state\..*))$|_scales$"
)
"""Scales, zero points and the like of a quantized weight."""


@dataclass(frozen=True)
class ModelPart:
    """One part of a model.

    Attributes:
        name: one of :data:`PARTS`.
        parameters: as before quantization.
        bytes: stored bytes, scales and zero points included.
    """

    name: str
    parameters: int
    bytes: int

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits per parameter; None for a part without parameters."""
        return self.bytes * 8 / self.parameters if self.parameters else None


@dataclass(frozen=True)
class ParameterCount:
    """Parameters and bytes of a checkpoint.

    Attributes:
        parts: every part with bytes, in the order of :data:`PARTS`.
        quantized: all weights stored as codes.
    """

    parts: tuple[ModelPart, ...]
    quantized: ModelPart
    quantized_tensors: int

    @property
    def parameters(self) -> int:
        """Parameters of all parts."""
        return sum(part.parameters for part in self.parts)


def count(checkpoint: Checkpoint) -> ParameterCount:
    """Count parameters and bytes of a checkpoint. Reads no tensors but ``weight_shape`` (16 bytes)."""
    quantization = checkpoint.config.get("quantization_config")
    codes = _code_counter(checkpoint, quantization) if isinstance(quantization, dict) else None
    sums = {part: [0, 0] for part in PARTS}
    packed = [0, 0, 0]
    for name, info in checkpoint.stored.items():
        part = "mtp" if name in checkpoint.mtp else part_of(name)
        auxiliary = codes is not None and bool(AUXILIARY.search(name))
        coded = codes(info) if codes and not auxiliary else None
        numbers = math.prod(info.shape) if coded is None else coded
        if auxiliary or _DERIVED.match(name):
            numbers = 0
        if coded is not None or (auxiliary and not name.endswith("weight_shape")):
            packed = [packed[0] + (coded is not None), packed[1] + numbers, packed[2] + info.nbytes]
        sums[part] = [sums[part][0] + numbers, sums[part][1] + info.nbytes]
    parts = tuple(ModelPart(part, *sums[part]) for part in PARTS if sums[part][1])
    return ParameterCount(parts, ModelPart("quantized", packed[1], packed[2]), packed[0])


def part_of(name: str) -> str:
    """The part of the model of a tensor, by its name."""
    components = name.lower().split(".")
    if components[0] in _GGUF:
        return _GGUF[components[0]]
    for part, pattern in _RULES:
        if any(re.search(pattern, component) for component in components):
            return part
    return "other"


def _code_counter(checkpoint: Checkpoint, quantization: dict[str, Any]) -> Callable[[TensorInfo], int | None]:
    """A function from a stored tensor to the parameters that its codes encode; None for plain numbers."""
    bits, stored = code_bits(quantization), checkpoint.stored

    def parameters(info: TensorInfo) -> int | None:
        if info.block:
            return math.prod(info.weight_shape)
        numbers = math.prod(info.shape)
        stem, _, last = info.name.rpartition(".")
        if last == "weight_packed" and f"{stem}.weight_shape" in stored:
            return math.prod(int(size) for size in checkpoint.load(f"{stem}.weight_shape").tolist())
        if last == "trellis" and len(info.shape) == 3:
            return math.prod(info.shape[:2]) * 256
        if last == "weight" and info.dtype == "U32":
            stated = quantization.get(mlx_name(stem, checkpoint.config["model_type"]))
            return numbers * 32 // (code_bits(stated) if isinstance(stated, dict) else bits)
        if last in ("weight_packed", "qweight") and info.dtype == "I32":
            return numbers * 32 // bits
        if info.dtype == "U8" and (
            last == "weight_packed" or last.endswith("_blocks") or f"{info.name}.absmax" in stored
        ):
            return numbers * 2  # two 4-bit codes in a byte
        if last == "weight" and info.dtype in ("I8", "U8", "F8_E4M3", "F8_E5M2"):
            return numbers
        return None

    return parameters


def code_bits(quantization: dict[str, Any]) -> int:
    """Bits of a code by ``quantization_config``; 4 if it states none."""
    groups = quantization.get("config_groups")
    if isinstance(groups, dict):
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, dict) else None
            if isinstance(weights, dict) and isinstance(weights.get("num_bits"), int):
                return int(weights["num_bits"])
    for key in ("bits", "w_bit"):
        if isinstance(quantization.get(key), int) and quantization[key] > 0:
            return int(quantization[key])
    return 4
