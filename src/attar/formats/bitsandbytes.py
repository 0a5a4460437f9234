"""bitsandbytes: weights that transformers and peft load (``quant_method: bitsandbytes``).

bitsandbytes_nf4.py has the tensors of an NF4 weight (``load_in_4bit``), bitsandbytes_int8.py those of an
INT8 weight (``load_in_8bit``); here is the reader of both. The names of NF4 stand here too. Linears that are
listed in ``llm_int8_skip_modules``, embeddings and norms are dense.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from attar.checkpoint.tensors import stored_dtype
from attar.errors import CheckpointError, NumericsError
from attar.formats import bitsandbytes_int8 as int8
from attar.formats.bitsandbytes_nf4 import (
    ABSMAX,
    MAP,
    NESTED,
    NESTED_MAP,
    STATE,
    decode,
    encode,
    layout,
    quantization_config,
    read_state,
)
from attar.formats.coded import Coded
from attar.formats.compressed_tensors import check_codes, check_scales
from attar.formats.number_type import number_type
from attar.formats.rules import WeightRule

__all__ = [
    "CONV1D",
    "METHOD",
    "STATE",
    "BitsAndBytesReader",
    "decode",
    "dequantize_state",
    "encode",
    "is_packed",
    "layout",
    "quantization_config",
    "read_state",
]

T = TypeVar("T")
METHOD = "bitsandbytes"
CONV1D = ("gpt2", "openai-gpt", "imagegpt")  # families whose projections are Conv1D modules
NF4 = ("weight", ABSMAX, MAP, NESTED, NESTED_MAP, STATE)


class BitsAndBytesReader:
    """Reads an NF4 or INT8 checkpoint tensor by tensor.

    Attributes:
        checkpoint: what is read.
        dtype: of decoded INT8 weights, which do not say it; NF4 weights do.
    """

    def __init__(self, checkpoint: Any) -> None:
        self.checkpoint = checkpoint
        self.dtype = number_type(checkpoint)
        said = checkpoint.config.get("quantization_config") or {}
        if not (said.get("load_in_4bit") or said.get("load_in_8bit")):
            raise CheckpointError(
                f"{checkpoint.path}: config.json names neither load_in_4bit nor load_in_8bit",
                hint="of bitsandbytes' layouts attar reads NF4 and INT8",
            )

    def coded(self, name: str) -> bool:
        """Whether a stored tensor holds the codes of a weight."""
        return name.endswith(".weight") and (f"{name}.absmax" in self._stored() or self._whole(name))

    def codes(self, name: str) -> tuple[Coded, WeightRule] | None:
        """The codes of a stored INT8 weight as they are, and what they are; None for any other tensor.

        Raises:
            CheckpointError: its tensors do not fit together.
        """
        return (self._int8(name, int8.coded), int8.RULE) if self._whole(name) else None

    def slot(self, info: Any) -> tuple[str, str, tuple[int, ...]] | None:
        """Name, type and shape of what a stored tensor stands for; None for scales and the like."""
        if self._aside(info.name):
            return None
        if not self.coded(info.name):
            return info.name, info.dtype, info.shape
        if self._whole(info.name):
            (rows, columns), dtype = info.shape, self.dtype
        else:
            state = self._state(info.name)
            (rows, columns), dtype = state["shape"], getattr(torch, state["dtype"])
        return info.name, stored_dtype(dtype), (columns, rows) if self._turned() else (rows, columns)

    def dense(self, name: str) -> Tensor | None:
        """What a stored tensor stands for: a decoded weight for codes, None for scales and the like, itself
        otherwise.

        Raises:
            CheckpointError: a tensor of a coded weight is missing or does not fit.
        """
        if self._aside(name):
            return None
        if not self.coded(name):
            tensor: Tensor = self.checkpoint.load(name)
            return tensor
        weight = self._decoded(name)
        return weight.T.contiguous() if self._turned() else weight

    def check(self, name: str) -> None:
        """Raise where scales cannot be right or all codes are the same. A scale of zero is a block of zeros.

        Raises:
            NumericsError: names the layer.
        """
        if not self.coded(name):
            return
        base = name.removesuffix(".weight")
        if self._whole(name):
            scale = f"{base}.{int8.SCALE}"
            check_scales(scale, [self.checkpoint.load(scale)])
        for leaf in ("absmax", "nested_absmax"):
            if f"{name}.{leaf}" in self._stored():
                scales = self.checkpoint.load(f"{name}.{leaf}").float()
                if not (torch.isfinite(scales).all() and (scales >= 0).all() and scales.any()):
                    raise NumericsError(
                        f"{name}.{leaf} holds zero, negative or infinite scales",
                        hint="quantize the model again",
                    )
        check_codes(base, self.checkpoint.load(name))

    def _decoded(self, name: str) -> Tensor:
        """A decoded weight (N, K)."""
        if self._whole(name):
            return self._int8(name, lambda tensors: int8.decode(tensors, self.dtype))
        self._state(name)
        base = name.removesuffix("weight")
        leaves = [leaf for leaf in NF4 if base + leaf in self._stored()]
        try:
            return decode({leaf: self.checkpoint.load(base + leaf) for leaf in leaves})
        except (KeyError, RuntimeError) as error:
            raise self._unfit(name) from error

    def _int8(self, name: str, read: Callable[[Mapping[str, Tensor]], T]) -> T:
        """What ``read`` makes of the tensors of an INT8 weight."""
        base = name.removesuffix("weight")
        leaves = [leaf for leaf in int8.layout((0, 0)) if base + leaf in self._stored()]
        try:
            return read({leaf: self.checkpoint.load(base + leaf) for leaf in leaves})
        except (KeyError, ValueError, RuntimeError) as error:
            raise self._unfit(name) from error

    def _unfit(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self.checkpoint.path}: the tensors of {name} do not fit together",
            hint="the packed checkpoint is incomplete",
        )

    def _whole(self, name: str) -> bool:
        """Whether a stored tensor holds the codes of an INT8 weight."""
        info = self._stored().get(name)
        return name.endswith(".weight") and info is not None and info.dtype == "I8"

    def _aside(self, name: str) -> bool:
        """Whether a tensor belongs to a weight and is none itself."""
        base, _, leaf = name.rpartition(".")
        return ".weight." in name or (
            leaf in (int8.SCALE, int8.FORMAT) and f"{base}.weight" in self._stored()
        )

    def _stored(self) -> Mapping[str, Any]:
        tensors: Mapping[str, Any] = self.checkpoint.tensors
        return tensors

    def _turned(self) -> bool:
        """Whether the family keeps its weights as Conv1D does."""
        return self.checkpoint.config.get("model_type") in CONV1D

    def _state(self, name: str) -> dict[str, Any]:
        """What the JSON of a coded weight says."""
        stored = f"{name.removesuffix('weight')}{STATE}"
        if stored not in self._stored():
            raise CheckpointError(
                f"{self.checkpoint.path}: {stored} is missing",
                hint="of bitsandbytes' 4-bit layouts attar reads NF4",
            )
        try:
            state = read_state(self.checkpoint.load(stored))
            return {**state, "shape": [int(size) for size in state["shape"]]}
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{self.checkpoint.path}: {stored} is damaged") from error


def is_packed(config: Mapping[str, Any]) -> bool:
    """Whether a model's config says that its weights are in this layout."""
    return (config.get("quantization_config") or {}).get("quant_method") == METHOD


def dequantize_state(checkpoint: Any) -> dict[str, Tensor]:
    """Every tensor of an NF4 or INT8 checkpoint, decoded, under the names of the unquantized model.

    Raises:
        CheckpointError: a tensor is missing, or the layout is another one.
    """
    reader = BitsAndBytesReader(checkpoint)
    decoded = {name: reader.dense(name) for name in checkpoint.tensors}
    return {name: tensor for name, tensor in decoded.items() if tensor is not None}
