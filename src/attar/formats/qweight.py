"""The reader of layouts whose codes are called ``qweight`` (GPTQ, AWQ): what the two have in common.

Beside the codes of a Linear stand ``qzeros``, ``scales`` and, with GPTQ, ``g_idx``; its ``bias`` is an
ordinary tensor. A decoded weight has the type of its scales, as in the kernels that multiply in that type:

    w = half(s (q - z))

The difference of two whole numbers is exact and the product is rounded once. Kernels that fold s z beforehand
(Machete) round twice.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attar.errors import CheckpointError, NumericsError
from attar.formats.bitsandbytes import CONV1D
from attar.formats.coded import Coded
from attar.formats.compressed_tensors import check_codes
from attar.formats.rules import WeightRule
from attar.formats.values import values

QWEIGHT, QZEROS, SCALES, G_IDX = "qweight", "qzeros", "scales", "g_idx"
ASIDE = (QZEROS, SCALES, G_IDX)
HALVES = ("F16", "BF16")
HEAD = "lm_head"
FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
"""What vLLM calls the module that it makes of several; its patterns are matched against this name."""
TensorSpecs = dict[str, tuple[str, tuple[int, ...]]]


def pattern(name: str) -> str:
    """A regular expression for one module, and for the one that vLLM makes of it and its neighbours."""
    parent, _, leaf = name.rpartition(".")
    leaf = f"(?:{leaf}|{FUSED[leaf]})" if leaf in FUSED else re.escape(leaf)
    return f"^{re.escape(f'{parent}.') if parent else ''}{leaf}$"


def code_bytes(codes: Tensor, bits: int) -> Tensor:
    """Signed codes as they are stored: uint8, 0 to 2^bits - 1."""
    return codes.to(torch.int8).view(torch.uint8) + 2 ** (bits - 1)


def signed(codes: Tensor, bits: int) -> Tensor:
    """The inverse: int8."""
    return (codes - 2 ** (bits - 1)).view(torch.int8)


def half_scales(scales: Tensor) -> Tensor:
    """Stored scales in the type in which kernels compute: their own, and float16 for float32."""
    return scales if scales.dtype in (torch.float16, torch.bfloat16) else scales.half()


def decoded(weight: Coded, rule: WeightRule, dtype: torch.dtype) -> Tensor:
    """The weight (N, K) as a kernel computes it."""
    rows, columns = weight.codes.shape
    return values(weight, rule.tile((rows, columns))[1]).to(dtype)


class QweightReader(ABC):
    """Reads such a checkpoint tensor by tensor; GPTQ and AWQ say what differs.

    Attributes:
        checkpoint: what is read.
    """

    def __init__(self, checkpoint: Any) -> None:
        self.checkpoint = checkpoint

    @abstractmethod
    def rule(self, module: str) -> WeightRule:
        """What the config says of a Linear."""

    @abstractmethod
    def shape(self, module: str, rule: WeightRule) -> tuple[int, int]:
        """(N, K) of a Linear, from the shapes of its tensors."""

    @abstractmethod
    def layout(self, shape: tuple[int, int], rule: WeightRule) -> TensorSpecs:
        """Types and shapes that its tensors must have."""

    @abstractmethod
    def unpack(self, tensors: Mapping[str, Tensor], rule: WeightRule) -> Coded:
        """Its codes."""

    def coded(self, name: str) -> bool:
        """Whether a stored tensor holds the codes of a weight."""
        return name.endswith(f".{QWEIGHT}")

    def aside(self, name: str) -> bool:
        """Whether a tensor belongs to a weight and is none itself."""
        base, _, leaf = name.rpartition(".")
        return leaf in ASIDE and f"{base}.{QWEIGHT}" in self.checkpoint.tensors

    def described(self, name: str) -> tuple[WeightRule, tuple[int, int]] | None:
        """Rule and shape (N, K) of a coded weight, from headers; None for any other tensor."""
        return self._fitting(name.removesuffix(f".{QWEIGHT}")) if self.coded(name) else None

    def codes(self, name: str) -> tuple[Coded, WeightRule] | None:
        """The codes of a stored weight as they are, and what they are; None for any other tensor.

        The rule is that of the numbers: symmetric where every zero point is the middle of the codes, ordered
        where the groups are not neighbours, whatever the config says.

        Raises:
            CheckpointError: its tensors are missing or do not fit the config.
        """
        if not self.coded(name):
            return None
        base = name.removesuffix(f".{QWEIGHT}")
        rule, _ = self._fitting(base)
        leaves = [leaf for leaf in (QWEIGHT, *ASIDE) if f"{base}.{leaf}" in self.checkpoint.tensors]
        tensors = {leaf: self.checkpoint.load(f"{base}.{leaf}") for leaf in leaves}
        groups = tensors[SCALES].shape[0]
        if G_IDX in tensors and not ((tensors[G_IDX] >= 0) & (tensors[G_IDX] < groups)).all():
            raise CheckpointError(
                f"{self.checkpoint.path}: {base}.{G_IDX} names groups that {base}.{SCALES} does not have",
                hint="the file is damaged; get it again",
            )
        weight = self.unpack(tensors, rule)
        return weight, WeightRule(
            "int",
            rule.bits,
            rule.strategy,
            rule.group_size,
            symmetric=weight.zero is None,
            ordered=weight.order is not None,
        )

    def slot(self, info: Any) -> tuple[str, str, tuple[int, ...]] | None:
        """Name, type and shape of what a stored tensor stands for; None for scales and the like."""
        if self.aside(info.name):
            return None
        if not self.coded(info.name):
            return info.name, info.dtype, info.shape
        base = info.name.removesuffix(f".{QWEIGHT}")
        shape = self._fitting(base)[1]
        kind = self.checkpoint.tensors[f"{base}.{SCALES}"].dtype
        return (
            f"{base}.weight",
            kind if kind in HALVES else "F16",
            shape[::-1] if self._turned(base) else shape,
        )

    def dense(self, name: str) -> Tensor | None:
        """What a stored tensor stands for: a decoded weight for codes, None for scales and the like, itself
        otherwise.

        Raises:
            CheckpointError: a tensor of a coded weight is missing, or the config does not fit it.
        """
        if self.aside(name):
            return None
        found = self.codes(name)
        if found is None:
            tensor: Tensor = self.checkpoint.load(name)
            return tensor
        weight = decoded(*found, self._dtype(name))
        return weight.T.contiguous() if self._turned(name.removesuffix(f".{QWEIGHT}")) else weight

    def check(self, name: str) -> None:
        """Raise where scales cannot be right or all codes are the same. Some writers choose negative scales.

        Raises:
            NumericsError: names the layer.
        """
        if not self.coded(name):
            return
        base = name.removesuffix(f".{QWEIGHT}")
        scales = half_scales(self.checkpoint.load(f"{base}.{SCALES}"))
        if not (torch.isfinite(scales).all() and (scales != 0).all()):
            raise NumericsError(
                f"{base}.{SCALES} holds scales that are zero or not finite", hint="quantize the model again"
            )
        check_codes(base, self.checkpoint.load(name))

    def _dtype(self, name: str) -> torch.dtype:
        kind = self.checkpoint.tensors[f"{name.removesuffix(QWEIGHT)}{SCALES}"].dtype
        return torch.bfloat16 if kind == "BF16" else torch.float16

    def _turned(self, base: str) -> bool:
        """Whether the model keeps this dense weight as Conv1D does; the head is none."""
        return self.checkpoint.config.get("model_type") in CONV1D and base != HEAD

    def _fitting(self, base: str) -> tuple[WeightRule, tuple[int, int]]:
        """Rule and shape of a Linear, checked against the types and shapes of its tensors."""
        tensors, rule = self.checkpoint.tensors, self.rule(base)
        for leaf in (QZEROS, SCALES):
            if f"{base}.{leaf}" not in tensors:
                raise CheckpointError(
                    f"{self.checkpoint.path}: {base}.{leaf} is missing",
                    hint="the packed checkpoint is incomplete",
                )
        shape = self.shape(base, rule)
        for leaf, (kind, size) in self.layout(shape, rule).items():
            info = tensors.get(f"{base}.{leaf}")
            if info is None:
                continue
            same = info.dtype == kind or (leaf == SCALES and info.dtype in (*HALVES, "F32"))
            if not same or info.shape != size:
                groups = f"{rule.bits} bits in groups of {rule.group_size or shape[1]}"
                raise CheckpointError(
                    f"{self.checkpoint.path}: {base}.{leaf} is {info.dtype} {list(info.shape)}, but {groups} "
                    f"make it {kind} {list(size)}",
                    hint="weights and config are of different versions",
                )
        return rule, shape


def read_state(reader: QweightReader) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, decoded, under the names of the unquantized model."""
    state: dict[str, Tensor] = {}
    for info in reader.checkpoint.tensors.values():
        slot = reader.slot(info)
        if slot is not None:
            tensor = reader.dense(info.name)
            assert tensor is not None, "what has a slot has numbers"
            state[slot[0]] = tensor
    return state
