"""Schemes by name: the number formats of weights and activations. The names come from compressed-tensors
(W4A16: weights of 4 bits, activations of 16) and mean the same; W8A8_STATIC and NF4 are ours.

A scheme is a preset, free of torch; plan.py decides which Linear gets which.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from attar.formats.rules import MX_GROUP, ActivationRule, WeightRule, format_of

if TYPE_CHECKING:
    import torch

    from attar.quantization.grids import Grid


@dataclass(frozen=True)
class QuantizationScheme:
    """How a Linear is quantized.

    Attributes:
        name: as in :data:`SCHEMES`.
        weights: how its weight is coded.
        activations: how its input is rounded; None: it is not.
    """

    name: str
    weights: WeightRule
    activations: ActivationRule | None = None

    @property
    def resizable(self) -> bool:
        """Whether the group size is a setting; other formats have their own."""
        return self.weights.kind == "int" and self.weights.strategy == "group"

    @property
    def divisor(self) -> int:
        """A number that must divide the inputs of a Linear."""
        inputs = self.activations.group_size if self.activations else 0
        return max(self.weights.group_size, inputs, 1)

    @property
    def form(self) -> str:
        """The layout of its tensors in compressed-tensors."""
        return format_of(self.weights, self.activations)

    def sized(self, group_size: int) -> QuantizationScheme:
        """The scheme with another group size, where it is resizable; 0: one scale for each output."""
        if not self.resizable:
            return self
        strategy = "group" if group_size else "channel"
        return replace(self, weights=replace(self.weights, strategy=strategy, group_size=group_size))

    def grid(self, storage: torch.dtype, group_size: int | None = None) -> Grid:
        """The number format of the weights.

        Args:
            storage: type of the stored scales and of the decoded weight; FP4 and MX formats are always
                decoded to bfloat16.
            group_size: inputs that share a scale, where the scheme is resizable; 0: a whole row; None: the
                scheme's own.
        """
        rule = self.weights if group_size is None else self.sized(group_size).weights
        return _grid(rule, storage)


def _grid(rule: WeightRule, storage: torch.dtype) -> Grid:
    import torch

    from attar.quantization.grids import Float8Grid, IntGrid, MXFP4Grid, MXFP8Grid, NF4Grid, NVFP4Grid

    rows = 0 if rule.strategy == "tensor" else 1
    if rule.kind == "int":
        return IntGrid(rule.bits, rule.group_size, rule.symmetric, storage, rows)
    if rule.kind == "nf4":
        return NF4Grid(rule.group_size, rule.double, storage)
    if rule.bits == 4:
        return (NVFP4Grid if rule.strategy == "tensor_group" else MXFP4Grid)(torch.bfloat16)
    if rule.strategy == "group":
        return MXFP8Grid(storage=torch.bfloat16)
    height, width = rule.block or (rows, rule.group_size)
    return Float8Grid("e4m3fn", group_size=width, rows=height, storage=storage)


def _integer(bits: int, symmetric: bool = True) -> WeightRule:
    return WeightRule("int", bits, "group", 128, symmetric)


_INT8 = WeightRule("int", 8, "channel")
_TOKEN8 = ActivationRule("int", 8, "token")
_FP8_TOKEN = ActivationRule("float", 8, "token")
_FP8_TENSOR = ActivationRule("float", 8, "tensor", dynamic=False)
_NVFP4, _MXFP4 = WeightRule("float", 4, "tensor_group", 16), WeightRule("float", 4, "group", MX_GROUP)
_NVFP4_GROUP = ActivationRule("float", 4, "tensor_group", group_size=16)
_MXFP4_GROUP = ActivationRule("float", 4, "group", group_size=MX_GROUP, mx=True)
_MXFP8_GROUP = ActivationRule("float", 8, "group", group_size=MX_GROUP, mx=True)
_FP8_GROUP = ActivationRule("float", 8, "group", group_size=128)

_ALL = (
    *(QuantizationScheme(f"W{bits}A16", _integer(bits)) for bits in (8, 6, 5, 4, 3, 2)),
    QuantizationScheme("W4A16_ASYM", _integer(4, symmetric=False)),
    QuantizationScheme("W8A8", _INT8, _TOKEN8),
    QuantizationScheme("W8A8_STATIC", _INT8, ActivationRule("int", 8, "tensor", dynamic=False)),
    QuantizationScheme("W4A8", _integer(4), _TOKEN8),
    QuantizationScheme("W4AFP8", _integer(4), _FP8_TOKEN),
    QuantizationScheme("FP8", WeightRule("float", 8, "tensor"), _FP8_TENSOR),
    QuantizationScheme("FP8_DYNAMIC", WeightRule("float", 8, "channel"), _FP8_TOKEN),
    QuantizationScheme("FP8_BLOCK", WeightRule("float", 8, "block", block=(128, 128)), _FP8_GROUP),
    QuantizationScheme("NVFP4", _NVFP4, _NVFP4_GROUP),
    QuantizationScheme("NVFP4A16", _NVFP4),
    QuantizationScheme("MXFP4", _MXFP4, _MXFP4_GROUP),
    QuantizationScheme("MXFP4A16", _MXFP4),
    QuantizationScheme("MXFP8", WeightRule("float", 8, "group", MX_GROUP), _MXFP8_GROUP),
    QuantizationScheme("NF4", WeightRule("nf4", 4, "group", 64)),
)

SCHEMES: Mapping[str, QuantizationScheme] = MappingProxyType(
    {scheme.name: scheme for scheme in _ALL} | {"INT8": next(s for s in _ALL if s.name == "W8A8")}
)
"""Every scheme by name; INT8 is another name of W8A8."""

ALIASES = {name.removesuffix("A16"): name for name in SCHEMES if name.endswith("A16")}
ALIASES = {alias: name for alias, name in ALIASES.items() if alias not in SCHEMES} | {"W8A8_FP8": "FP8"}
"""Further names that settings take: W4 is W4A16."""

KV_CACHES: Mapping[str, ActivationRule | None] = MappingProxyType(
    {
        "none": None,
        "fp8": _FP8_TENSOR,
        "int8": ActivationRule("int", 8, "group"),
        "int4": None,
    }
)
"""How keys and values are rounded: fp8 with one calibrated scale for each layer's keys and one for its
values; int8 with a scale for each token and head, computed at run time (the group is one head); int4 in
attar's runtime alone, which reads what was calibrated from a file of its own (kv_basis.py)."""


def scheme_hint(name: str) -> str:
    """Where a name that is no scheme belongs; "": nowhere known."""
    if not re.fullmatch(r"I?Q\d_?\w*", name.upper()):
        return ""
    return f"types of GGUF files are made by attar export MODEL -o NAME.gguf --type {name.upper()}"
