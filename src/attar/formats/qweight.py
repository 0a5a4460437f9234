"""What GPTQ and AWQ have in common: layouts whose codes are called ``qweight``.

Each quantized Linear has ``qweight``, ``qzeros``, ``scales`` and, with GPTQ, ``g_idx``; its ``bias`` is an
ordinary tensor. A decoded weight has the type of its scales, as in the kernels that multiply in that type:

    w = half(s (q - z))

The difference of two whole numbers is exact and the product is rounded once. Kernels that fold s z beforehand
(Machete) round twice.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.tensors import TORCH
from attar.errors import CheckpointError, NumericsError
from attar.formats.coded import Coded, WeightLayout, dequantize
from attar.formats.dense_names import FUSED
from attar.formats.packed_reader import PackedReader, check_codes
from attar.formats.rules import CONV1D, WeightRule, whole_number

QWEIGHT, QZEROS, SCALES, G_IDX = "qweight", "qzeros", "scales", "g_idx"
AUXILIARY = (QZEROS, SCALES, G_IDX)
HALVES = ("F16", "BF16")
BITS_KEYS, SIZE_KEYS = ("bits", "w_bit", "wbits"), ("group_size", "q_group_size", "groupsize")
"""Names of two numbers in the files of all writers, the usual one first."""
HEAD = "lm_head"


def pattern(name: str) -> str:
    """A regular expression for a module, and for the one into which vLLM fuses it."""
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


def kernel_weight(weight: Coded, rule: WeightRule, scales: Tensor) -> Tensor:
    """The weight (N, K) as a kernel computes it, in the type of :func:`half_scales`."""
    rows, columns = weight.codes.shape
    return dequantize(weight, rule.tile((rows, columns))[1]).to(half_scales(scales).dtype)


class QweightReader(PackedReader):
    """Reads a GPTQ or AWQ checkpoint tensor by tensor.

    Attributes:
        config: its ``quantization_config``, wherever it is stored.
    """

    def __init__(self, checkpoint: Any) -> None:
        super().__init__(checkpoint)
        self.config = dict(checkpoint.config.get("quantization_config") or {})

    @abstractmethod
    def rule(self, module: str) -> WeightRule:
        """The config's rule of a Linear.

        Raises:
            CheckpointError: the config has none, or one that the format does not know.
        """

    @abstractmethod
    def shape(self, qweight: tuple[int, int], module: str, rule: WeightRule) -> tuple[int, int]:
        """(N, K) of a Linear, from the shapes of its tensors."""

    @abstractmethod
    def layout(self, shape: tuple[int, int], rule: WeightRule) -> WeightLayout:
        """Types and shapes that its tensors must have."""

    @abstractmethod
    def unpack(self, tensors: Mapping[str, Tensor], rule: WeightRule) -> Coded:
        """Its codes."""

    def is_coded(self, name: str) -> bool:
        return name.endswith(f".{QWEIGHT}")

    def is_auxiliary(self, name: str) -> bool:
        base, _, leaf = name.rpartition(".")
        return leaf in AUXILIARY and f"{base}.{QWEIGHT}" in self.checkpoint.tensors

    def is_transposed(self, name: str) -> bool:
        """Whether the module is a Conv1D; the head is none."""
        base = name.removesuffix(f".{QWEIGHT}")
        return self.checkpoint.config.get("model_type") in CONV1D and base != HEAD

    def weight_header(self, name: str) -> tuple[str, str, tuple[int, int]]:
        base = name.removesuffix(f".{QWEIGHT}")
        shape = self._fitting(base)[1]
        dtype = self.checkpoint.tensors[f"{base}.{SCALES}"].dtype
        return f"{base}.weight", dtype if dtype in HALVES else "F16", shape

    def weight(self, name: str) -> Tensor:
        base = name.removesuffix(f".{QWEIGHT}")
        rule, _ = self._fitting(base)
        tensors = self._tensors(base)
        return kernel_weight(self.unpack(tensors, rule), rule, tensors[SCALES])

    def rule_and_shape(self, name: str) -> tuple[WeightRule, tuple[int, int]] | None:
        """Rule and shape (N, K) of a coded weight, from headers; None for any other tensor."""
        return self._fitting(name.removesuffix(f".{QWEIGHT}")) if self.is_coded(name) else None

    def codes(self, name: str) -> tuple[Coded, WeightRule] | None:
        """As in the base class. The numbers decide the rule, whatever the config states: symmetric where
        every zero point is the middle of the codes, ordered where the groups are not neighbours."""
        if not self.is_coded(name):
            return None
        base = name.removesuffix(f".{QWEIGHT}")
        rule, _ = self._fitting(base)
        weight = self.unpack(self._tensors(base), rule)
        return weight, WeightRule(
            "int",
            rule.bits,
            rule.strategy,
            rule.group_size,
            symmetric=weight.zero is None,
            ordered=weight.g_idx is not None,
        )

    def grid(self, name: str) -> tuple[WeightRule, torch.dtype] | None:
        """As in the base class, but from the tensors: see :meth:`codes`."""
        coded = self.codes(name)
        dtype = self.weight_header(name)[1] if coded else ""
        return None if coded is None else (coded[1], getattr(torch, TORCH[dtype]))

    def check(self, name: str) -> None:
        """As in the base class. Some writers choose negative scales."""
        if not self.is_coded(name):
            return
        base = name.removesuffix(f".{QWEIGHT}")
        scales = half_scales(self.checkpoint.load(f"{base}.{SCALES}"))
        if not (torch.isfinite(scales).all() and (scales != 0).all()):
            raise NumericsError(
                f"{base}.{SCALES} holds scales that are zero or not finite", hint="quantize the model again"
            )
        check_codes(base, self.checkpoint.load(name), scales)

    def read_group_rule(
        self, entry: Mapping[str, Any], known: tuple[int, ...], default: int | None, symmetric: bool
    ) -> WeightRule:
        """The rule of stated bits and group size (-1: the whole row), under any writer's names.

        Args:
            known: bits that the layout has; the first where none are stated and there is one.
            default: of the group size; None: it must be stated.

        Raises:
            CheckpointError: a number is missing, or one that the layout does not have.
        """
        bits = whole_number(entry, *BITS_KEYS, default=known[0] if len(known) == 1 else None)
        size = whole_number(entry, *SIZE_KEYS, default=default)
        if bits not in known or size == 0 or size < -1:
            method = str(entry.get("quant_method")).upper()
            raise CheckpointError(
                f"{self.checkpoint.path}: {method} with bits {bits} and group_size {size}",
                hint=f"attar reads {', '.join(map(str, known))} bits, in groups of 1 or more, or -1",
            )
        return WeightRule("int", bits, "group" if size > 0 else "channel", max(size, 0), symmetric)

    def _tensors(self, base: str) -> dict[str, Tensor]:
        """The tensors of a Linear; groups that g_idx names must have scales."""
        tensors = self.load_present(f"{base}.", (QWEIGHT, *AUXILIARY))
        groups = tensors[SCALES].shape[0]
        if G_IDX in tensors and not ((tensors[G_IDX] >= 0) & (tensors[G_IDX] < groups)).all():
            raise CheckpointError(
                f"{self.checkpoint.path}: {base}.{G_IDX} names groups that {base}.{SCALES} does not have",
                hint="the file is damaged; get it again",
            )
        return tensors

    def _fitting(self, base: str) -> tuple[WeightRule, tuple[int, int]]:
        """Rule and shape of a Linear, checked against the types and shapes of its tensors."""
        rule = self.rule(base)
        for leaf in (QZEROS, SCALES):
            self.stored(f"{base}.{leaf}")
        stored = self.checkpoint.tensors[f"{base}.{QWEIGHT}"].shape
        if len(stored) != 2:
            raise CheckpointError(f"{self.checkpoint.path}: {base}.{QWEIGHT} has {len(stored)} axes, not 2")
        shape = self.shape(stored, base, rule)
        for leaf, (dtype, size) in self.layout(shape, rule).items():
            info = self.checkpoint.tensors.get(f"{base}.{leaf}")
            if info is None:
                continue
            same = info.dtype == dtype or (leaf == SCALES and info.dtype in (*HALVES, "F32"))
            if not same or info.shape != size:
                groups = f"{rule.bits} bits in groups of {rule.group_size or shape[1]}"
                raise CheckpointError(
                    f"{self.checkpoint.path}: {base}.{leaf} is {info.dtype} {list(info.shape)}, but {groups} "
                    f"make it {dtype} {list(size)}",
                    hint="weights and config are of different versions",
                )
        return rule, shape
