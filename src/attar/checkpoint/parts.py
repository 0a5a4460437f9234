"""Parameters and bytes of a checkpoint, by part of the model, from headers alone.

A quantized weight is several stored tensors: codes, scales, zero points. Together they are one logical
weight, counted with as many parameters as it had before, and with the bytes of all of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attar.checkpoint.open import Checkpoint
from attar.checkpoint.tensors import TensorInfo

PARTS = ("embedding", "attention", "mlp", "norm", "head", "other")

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
"""Part and a pattern for one component of a dotted tensor name; the first rule that matches decides."""

_GGUF = {
    "token_embd": "embedding",
    "position_embd": "embedding",
    "output": "head",
}
"""Parts by the first component of a name, where llama.cpp's says what others do not."""

_MADE = re.compile(r"^rope_(freqs|factors_\w+)\.weight$")
"""Tensors of llama.cpp's that are made from the config: bytes, and no parameters."""

_BESIDE = re.compile(
    r"\.(weight_(scale|scale_inv|zero_point|shape|g_idx|global_scale)|(input|output)_(scale|zero_point|global_scale)"
    r"|[qkv]_(scale|zero_point)|qzeros|scales|g_idx|weight\.(absmax|quant_map|nested_\w+|quant_state\..*))$|_scales$"
)
"""Names of tensors that only describe another one, in a quantized checkpoint."""


@dataclass(frozen=True)
class ModelPart:
    """One part of a model.

    Attributes:
        name: one of :data:`PARTS`.
        parameters: numbers that the part consists of, as before quantization.
        bytes: bytes that it takes in the file, scales and zero points included.
    """

    name: str
    parameters: int
    bytes: int

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits for one parameter; None for a part without parameters."""
        return self.bytes * 8 / self.parameters if self.parameters else None


@dataclass(frozen=True)
class ParameterCount:
    """What a checkpoint consists of.

    Attributes:
        parts: every part that is there, in the order of :data:`PARTS`.
        quantized: the weights stored as codes, taken together as a part of that name.
        quantized_tensors: how many weights are stored as codes.
    """

    parts: tuple[ModelPart, ...]
    quantized: ModelPart
    quantized_tensors: int

    @property
    def parameters(self) -> int:
        """Parameters of all parts."""
        return sum(part.parameters for part in self.parts)


def count(checkpoint: Checkpoint) -> ParameterCount:
    """Count parameters and bytes of an opened checkpoint. Of tensors, only ``weight_shape`` (16 bytes) is
    read.

    A head that is tied to the embedding but stored all the same counts its bytes and no parameters.
    """
    quantization = checkpoint.config.get("quantization_config")
    codes = _code_counter(checkpoint, quantization) if isinstance(quantization, dict) else None
    tied = bool(checkpoint.config.get("tie_word_embeddings"))
    tensors = checkpoint.tensors.items()
    embeddings = [info.weight_shape for name, info in tensors if part_of(name) == "embedding"]
    sums = {part: [0, 0] for part in PARTS}
    packed = [0, 0, 0]
    for name, info in checkpoint.tensors.items():
        part = part_of(name)
        beside = codes is not None and bool(_BESIDE.search(name))
        found = codes(info) if codes and not beside else None
        numbers = 0 if beside or _MADE.match(name) else math.prod(info.shape) if found is None else found
        if found is not None or (beside and not name.endswith("weight_shape")):
            packed = [packed[0] + (found is not None), packed[1] + numbers, packed[2] + info.nbytes]
        if part == "head" and tied and info.weight_shape in embeddings:
            numbers = 0
        sums[part] = [sums[part][0] + numbers, sums[part][1] + info.nbytes]
    parts = tuple(ModelPart(part, *sums[part]) for part in PARTS if sums[part][1])
    return ParameterCount(parts, ModelPart("quantized", packed[1], packed[2]), packed[0])


def part_of(name: str) -> str:
    """The part of the model that a tensor belongs to, by its name."""
    components = name.lower().split(".")
    if components[0] in _GGUF:
        return _GGUF[components[0]]
    for part, pattern in _RULES:
        if any(re.search(pattern, component) for component in components):
            return part
    return "other"


def _code_counter(checkpoint: Checkpoint, quantization: dict[str, Any]) -> Callable[[TensorInfo], int | None]:
    """A function from a stored tensor to the parameters it codes for, or None when it holds plain numbers."""
    bits = code_bits(quantization)

    def parameters(info: TensorInfo) -> int | None:
        if info.block:
            return math.prod(info.weight_shape)
        numbers = math.prod(info.shape)
        stem, _, last = info.name.rpartition(".")
        if last == "weight_packed" and f"{stem}.weight_shape" in checkpoint.tensors:
            return math.prod(int(size) for size in checkpoint.load(f"{stem}.weight_shape").tolist())
        if last in ("weight_packed", "qweight") and info.dtype == "I32":
            return numbers * 32 // bits
        if info.dtype == "U8" and (
            last == "weight_packed" or last.endswith("_blocks") or f"{info.name}.absmax" in checkpoint.tensors
        ):
            return numbers * 2  # two 4-bit codes in a byte
        if last == "weight" and info.dtype in ("I8", "U8", "F8_E4M3", "F8_E5M2"):
            return numbers
        return None

    return parameters


def code_bits(quantization: dict[str, Any]) -> int:
    """Bits of a weight's code as ``quantization_config`` says; 4 where it does not say."""
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
