"""How weights and activations are quantized, in the terms of compressed-tensors: plain data, no torch.

A rule names the number type (``kind``, ``bits``) and the values that share a scale (``strategy``): ``tensor``
all, ``channel`` a row of the weight, ``group`` g neighbours in a row, ``block`` a rectangle, ``tensor_group``
groups whose scales have a global scale, ``token`` one vector of an activation, ``attn_head`` one head of the
KV cache.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attar.errors import CheckpointError

PACK, INT, FLOAT, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
NVFP4, MXFP4, MXFP8 = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
"""Layouts of one Linear, as compressed-tensors calls them; layouts.py has their bytes."""
BFLOAT16 = (NVFP4, MXFP4, MXFP8)  # are decoded to it, whatever the model's type
MX_GROUP = 32  # inputs that share a power of two in MXFP4 and MXFP8
CONV1D = ("gpt2", "openai-gpt", "imagegpt")  # families whose projections are Conv1D modules
KINDS = ("int", "float")
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group", "token", "attn_head")
SCALE_DTYPES = {"group": "torch.uint8", "tensor_group": "torch.float8_e4m3fn"}  # of float codes
ORDERS = (False, True, "group", "dynamic", "weight", "static")
"""Values of ``actorder``: none, act-order ``group`` in three spellings, and two that leave no trace."""


def whole_number(entry: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The first of these keys of a quantization config: a whole number, also one written as text or as a
    float.

    Raises:
        CheckpointError: it is none, or missing and without a default; names the key.
    """
    name = next((name for name in names if entry.get(name) is not None), names[0])
    value: Any = entry.get(name)
    value = default if value is None else value
    text = value.strip() if isinstance(value, str) else ""
    if (isinstance(value, float) and value.is_integer()) or re.fullmatch(r"-?[0-9]{1,9}", text):
        value = int(value)
    if type(value) is not int:
        raise CheckpointError(
            f"config.json: quantization_config: {name} is {value!r}, but must be a whole number"
        )
    return value


def one_of(entry: Mapping[str, Any], name: str, allowed: tuple[Any, ...], default: Any) -> Any:
    """A key of a quantization config that has one of few values.

    Raises:
        CheckpointError: it has another one; names the key.
    """
    value = entry.get(name)
    if value is None:
        return default
    if value not in allowed:
        known = ", ".join(str(item) for item in allowed if item is not None)
        raise CheckpointError(
            f"config.json: quantization_config: {name} is {value!r}, but must be one of {known}"
        )
    return value


def mapping(value: Any, name: str) -> Mapping[str, Any]:
    """An object in a quantization config.

    Raises:
        CheckpointError: it is none; names the key.
    """
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: quantization_config: {name} is {value!r}, not an object")
    return value


def texts(value: Any, name: str) -> tuple[str, ...]:
    """A list of texts in a quantization config.

    Raises:
        CheckpointError: it is none; names the key.
    """
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"config.json: quantization_config: {name} is {value!r}, not a list of texts")
    return tuple(value)


@dataclass(frozen=True)
class WeightRule:
    """How a weight is coded.

    Attributes:
        kind: ``int``, ``float`` or ``nf4``.
        strategy: ``tensor``, ``channel``, ``group``, ``block`` or ``tensor_group``.
        group_size: g of a strategy with groups; 0: no groups.
        symmetric: no zero points.
        block: (rows, columns) of a block.
        double: NF4 whose block scales are 8-bit codes (double quantization).
        ordered: ``weight_g_idx`` has the group of each input (act-order ``group``).
    """

    kind: str
    bits: int
    strategy: str
    group_size: int = 0
    symmetric: bool = True
    block: tuple[int, int] | None = None
    double: bool = False
    ordered: bool = False

    def tile(self, shape: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of a weight (N, K) that share a scale."""
        if self.block:
            return self.block
        if self.strategy == "tensor":
            return shape
        return 1, self.group_size or shape[1]

    def tiles(self, shape: tuple[int, int]) -> tuple[int, int]:
        """(P, G): how many tiles a weight (N, K) has."""
        height, width = self.tile(shape)
        return -(-shape[0] // height), -(-shape[1] // width)

    def config(self) -> dict[str, Any]:
        """The ``weights`` entry of a config group."""
        entry: dict[str, Any] = {
            "num_bits": self.bits,
            "type": self.kind,
            "symmetric": self.symmetric,
            "strategy": self.strategy,
            "group_size": self.group_size or None,
            "dynamic": False,
        }
        if self.block:
            entry["block_structure"] = list(self.block)
        if self.ordered:
            entry["actorder"] = "group"
        if self.kind == "float" and self.strategy in ("group", "tensor_group"):
            entry["scale_dtype"] = SCALE_DTYPES[self.strategy]
        return entry

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> WeightRule:
        """The rule of a ``weights`` entry, with the library's defaults."""
        block = entry.get("block_structure")
        if isinstance(block, str):  # "128x128", as older files have it
            block = [int(size) for size in block.split("x")]
        strategy, size = _sharing(entry)
        return cls(
            kind=one_of(entry, "type", KINDS, "int"),
            bits=whole_number(entry, "num_bits", default=8),
            strategy=strategy,
            group_size=size,
            symmetric=one_of(entry, "symmetric", (True, False), True),
            block=(int(block[0]), int(block[1])) if block else None,
            ordered=one_of(entry, "actorder", ORDERS, False) in (True, "group", "dynamic"),
        )


@dataclass(frozen=True)
class ActivationRule:
    """How the inputs of a Linear, or the keys and values of a cache, are rounded.

    Attributes:
        kind: ``int`` or ``float``.
        strategy: ``token``, ``tensor``, ``group``, ``tensor_group`` or ``attn_head``.
        dynamic: the scale is computed from the values; False: it is stored in the file. Of ``tensor_group``
            the global scale is stored.
        group_size: g of a strategy with groups.
        symmetric: no zero points.
        mx: a group's scale is a power of two.
    """

    kind: str
    bits: int
    strategy: str
    dynamic: bool = True
    group_size: int = 0
    symmetric: bool = True
    mx: bool = False

    @property
    def static(self) -> bool:
        """Whether calibration finds a scale, which the file stores."""
        return not self.dynamic or self.strategy == "tensor_group"

    @property
    def limits(self) -> tuple[float, float]:
        """The smallest and the largest code."""
        if self.kind == "int":
            return -(2.0 ** (self.bits - 1)), 2.0 ** (self.bits - 1) - 1
        return (-448.0, 448.0) if self.bits == 8 else (-6.0, 6.0)

    def config(self) -> dict[str, Any]:
        """The ``input_activations`` entry of a config group, or ``kv_cache_scheme``."""
        entry: dict[str, Any] = {
            "num_bits": self.bits,
            "type": self.kind,
            "symmetric": self.symmetric,
            "strategy": self.strategy,
            "group_size": self.group_size or None,
            "dynamic": "local" if self.strategy == "tensor_group" else self.dynamic,
        }
        if self.mx or self.strategy == "tensor_group":
            entry["scale_dtype"] = SCALE_DTYPES[self.strategy]
        return entry

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> ActivationRule:
        """The rule of such an entry."""
        strategy, size = _sharing(entry)
        return cls(
            kind=one_of(entry, "type", KINDS, "int"),
            bits=whole_number(entry, "num_bits", default=8),
            strategy=strategy,
            dynamic=bool(one_of(entry, "dynamic", (True, False, "local"), False)),
            group_size=size,
            symmetric=one_of(entry, "symmetric", (True, False), True),
            mx=size == MX_GROUP and entry.get("scale_dtype") == SCALE_DTYPES["group"],
        )


def _sharing(entry: Mapping[str, Any]) -> tuple[str, int]:
    """Strategy and group size; a missing strategy follows from the group size."""
    size = whole_number(entry, "group_size", default=0)
    implied = "group" if size > 0 else "channel" if size == -1 else "tensor"
    return one_of(entry, "strategy", STRATEGIES, implied), max(size, 0)


def format_of(weights: WeightRule, activations: ActivationRule | None) -> str:
    """The layout that compressed-tensors chooses for a Linear with these rules."""
    if weights.kind == "float" and weights.bits == 4:
        return NVFP4 if weights.strategy == "tensor_group" else MXFP4
    if weights.kind == "float" and weights.strategy == "group":
        return MXFP8
    if activations is None:
        return PACK if weights.kind == "int" else NAIVE
    if weights.kind == "int" and activations.kind == "float":
        return PACK  # the library chooses INT, whose tensors vLLM's kernel does not take
    return INT if weights.kind == "int" else FLOAT
