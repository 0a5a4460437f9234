"""bitsandbytes: weights that transformers and peft load (``quant_method: bitsandbytes``), NF4 and INT8.

NF4 (``load_in_4bit``). For a Linear with weight (N, K), cut row by row into blocks of ``blocksize`` values:

    weight                    uint8 (ceil(N K / 2), 1): codes row by row, the first in the high nibble
    weight.absmax             float32 (blocks,), or uint8 codes of the scales (double quantization)
    weight.quant_map          float32 (16,): the levels
    weight.nested_absmax      float32 (ceil(blocks / 256),)
    weight.nested_quant_map   float32 (256,)
    weight.quant_state.bitsandbytes__nf4
                              uint8: JSON of quant_type, blocksize, dtype, shape; with double quantization
                                  also
                              of nested_blocksize, nested_dtype, nested_offset

A decoded weight is level times scale in float32, rounded once to ``dtype``; a coded scale is
nested_quant_map[code] * nested_absmax + nested_offset. The JSON is padded with spaces to a fixed length.

INT8 (``load_in_8bit``): one scale for each output. Dettmers, Lewis, Belkada, Zettlemoyer 2022, "LLM.int8()",
arXiv 2208.07339, section 3.

    weight          int8 (N, K): codes
    SCB             float32 (N,): 127 times the scale, which is a row's largest magnitude where bitsandbytes
                    itself rounded to nearest
    weight_format   uint8 (): 0, rows as they are

A decoded weight is code * (SCB / 127), in float32, rounded once to the model's type: for a scale of at most
17 significant bits (bfloat16, float16) exactly code * scale. An engine multiplies by a rounded 1 / 127, so
that its numbers differ in the last bit of a float32. It also rounds the inputs of each token to int8, except
columns with a magnitude of ``llm_int8_threshold`` or more.

A Conv1D's weight is stored as (N, K), as transformers expects it. Linears in ``llm_int8_skip_modules``,
embeddings and norms are dense.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from attar.checkpoint.tensors import stored_dtype
from attar.errors import CheckpointError, ModelError, NumericsError
from attar.formats.coded import Coded, WeightLayout
from attar.formats.packed_reader import PackedReader, check_codes, check_scales, weight_dtype
from attar.formats.rules import CONV1D, WeightRule

T = TypeVar("T")
METHOD = "bitsandbytes"
WEIGHT = "weight"
NESTED_BLOCK = 256  # scales that share a scale
NUMBER = 24  # characters of a float64 at most
STATE = "weight.quant_state.bitsandbytes__nf4"
ABSMAX, MAP, NESTED, NESTED_MAP = (
    "weight.absmax",
    "weight.quant_map",
    "weight.nested_absmax",
    "weight.nested_quant_map",
)
NF4 = (WEIGHT, ABSMAX, MAP, NESTED, NESTED_MAP, STATE)
SCB, WEIGHT_FORMAT = "SCB", "weight_format"
LARGEST = 127.0
THRESHOLD = 6.0  # of the paper, section 3.2, and of transformers
INT8_RULE = WeightRule("int", 8, "channel")


def encode_nf4(
    codes: Tensor,
    scale: Tensor,
    levels: Tensor,
    dtype: torch.dtype,
    nested: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The tensors of a Linear, by the last parts of their names.

    Args:
        codes: (N, K), 0 to 15.
        scale: float32 (N, K / blocksize); blocksize divides K.
        levels: float32 (16,).
        dtype: to which a reader decodes the weight.
        nested: of coded scales: ``absmax_codes`` (N, K / blocksize), ``nested_absmax``, ``nested_map`` and
            ``nested_offset``.
    """
    rows, columns = codes.shape
    flat = torch.nn.functional.pad(codes.to(torch.uint8).reshape(-1), (0, rows * columns % 2))
    tensors = {WEIGHT: (flat[0::2] << 4 | flat[1::2])[:, None], MAP: levels.float()}
    offset = float(nested["nested_offset"]) if nested else None
    if nested:
        tensors[ABSMAX] = nested["absmax_codes"].reshape(-1)
        tensors[NESTED], tensors[NESTED_MAP] = nested["nested_absmax"].float(), nested["nested_map"].float()
    else:
        tensors[ABSMAX] = scale.float().reshape(-1)
    state = _state_json((rows, columns), columns // scale.shape[1], dtype, offset)
    return {**tensors, STATE: torch.tensor(list(state), dtype=torch.uint8)}


def layout_nf4(shape: tuple[int, int], blocksize: int, dtype: torch.dtype, double: bool) -> WeightLayout:
    """Type and shape of the tensors that :func:`encode_nf4` returns for a weight of ``shape`` (N, K)."""
    count = shape[0] * shape[1]
    blocks = -(-count // blocksize)
    specs: WeightLayout = {
        WEIGHT: ("U8", (-(-count // 2), 1)),
        ABSMAX: ("U8" if double else "F32", (blocks,)),
        MAP: ("F32", (16,)),
    }
    if double:
        specs[NESTED], specs[NESTED_MAP] = ("F32", (-(-blocks // NESTED_BLOCK),)), ("F32", (256,))
    specs[STATE] = ("U8", (len(_state_json(shape, blocksize, dtype, 0.0 if double else None)),))
    return specs


def _state_json(shape: tuple[int, int], blocksize: int, dtype: torch.dtype, offset: float | None) -> bytes:
    """The JSON, in bitsandbytes' order; with an offset always of the same length."""
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": blocksize}
    state |= {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape)}
    if offset is None:
        return json.dumps(state).encode()
    state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": 0.0}
    length = len(json.dumps(state)) - len(json.dumps(0.0)) + NUMBER
    return json.dumps({**state, "nested_offset": offset}).ljust(length).encode()


def decode_nf4(tensors: Mapping[str, Tensor]) -> Tensor:
    """The weight (N, K) of a Linear, in the type that its state names."""
    state = read_state(tensors[STATE])
    count = state["shape"][0] * state["shape"][1]
    packed = tensors[WEIGHT].reshape(-1).view(torch.uint8)
    codes = torch.stack((packed >> 4, packed & 15), 1).reshape(-1)[:count]
    scale = _nf4_scales(tensors, state)
    values = torch.nn.functional.pad(tensors[MAP].float()[codes.int()], (0, -count % state["blocksize"]))
    values = (values.reshape(-1, state["blocksize"]) * scale[:, None]).reshape(-1)[:count]
    return values.to(getattr(torch, state["dtype"])).reshape(state["shape"])


def _nf4_scales(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Tensor:
    """Scale of each block, float32 (blocks,)."""
    absmax = tensors[ABSMAX]
    if NESTED not in tensors:
        return absmax.float()
    above = tensors[NESTED].float().repeat_interleave(int(state["nested_blocksize"]))[: absmax.numel()]
    return tensors[NESTED_MAP].float()[absmax.int()] * above + torch.tensor(float(state["nested_offset"]))


def read_state(stored: Tensor) -> dict[str, Any]:
    """The JSON of a ``quant_state`` tensor.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        state = json.loads(bytes(stored.tolist()).decode())
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(state, dict):
        raise ValueError("not an object")
    return state


def nf4_config(ignore: list[str], dtype: torch.dtype, double: bool) -> dict[str, Any]:
    """The ``quantization_config`` of config.json.

    Args:
        dtype: in which the reader computes.
        double: the scales are coded.
    """
    return {
        "quant_method": METHOD,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": double,
        "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": list(ignore),
    }


def refuse_int8(rule: WeightRule) -> None:
    """Raise where INT8 cannot hold the codes of a rule.

    Raises:
        ModelError: they are no whole numbers, have zero points, or a row has several scales.
    """
    one_scale = rule.kind == "int" and rule.symmetric and rule.strategy in ("channel", "tensor")
    if not one_scale or rule.ordered or rule.block:
        raise ModelError(
            f"bitsandbytes' INT8 has one scale for each output and no zeros; these codes are {rule.kind}"
            f"{rule.bits} by {rule.strategy}{'' if rule.symmetric else ' with zeros'}",
            hint="quantize with --scheme W8A8, or export another format",
        )


def encode_int8(weight: Coded) -> dict[str, Tensor]:
    """The tensors of a Linear, by the last part of their names. No code is changed.

    Args:
        weight: signed codes (N, K) and scales (N, 1) or (1, 1).

    Raises:
        ModelError: it has zero points or several scales in a row.
    """
    rows = weight.codes.shape[0]
    more = weight.zero is not None or weight.g_idx is not None or weight.scale.shape[1] != 1
    if more or weight.codes.is_floating_point():
        raise ModelError(
            "bitsandbytes' INT8 has whole codes, one scale for each output and no zeros",
            hint="quantize with --scheme W8A8, or export another format",
        )
    scale = (weight.scale.float() * LARGEST).reshape(-1).expand(rows)
    return {
        WEIGHT: weight.codes.to(torch.int8).contiguous(),
        SCB: scale.contiguous(),
        WEIGHT_FORMAT: torch.tensor(0, dtype=torch.uint8),
    }


def layout_int8(shape: tuple[int, int]) -> WeightLayout:
    """Type and shape of the tensors that :func:`encode_int8` returns for a weight of ``shape`` (N, K)."""
    return {WEIGHT: ("I8", shape), SCB: ("F32", (shape[0],)), WEIGHT_FORMAT: ("U8", ())}


def unpack_int8(tensors: Mapping[str, Tensor]) -> Coded:
    """The codes of stored tensors and their scales (N, 1).

    Raises:
        ValueError: the rows are laid out for an engine.
        RuntimeError: the tensors do not fit together.
    """
    if WEIGHT_FORMAT in tensors and int(tensors[WEIGHT_FORMAT]) != 0:
        raise ValueError("weight_format is not 0, rows as they are")
    codes = tensors[WEIGHT]
    return Coded(codes, (tensors[SCB].float() / LARGEST).reshape(codes.shape[0], 1))


def decode_int8(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The weight (N, K) of a Linear in ``dtype``. Raises as :func:`unpack_int8`."""
    weight = unpack_int8(tensors)
    return (weight.codes.float() * weight.scale).to(dtype)


def int8_config(ignore: list[str], threshold: float = THRESHOLD) -> dict[str, Any]:
    """The ``quantization_config`` of config.json.

    Args:
        threshold: columns of inputs with this magnitude or more are not rounded; 0: all are.
    """
    return {
        "quant_method": METHOD,
        "load_in_4bit": False,
        "load_in_8bit": True,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": list(ignore),
        "llm_int8_threshold": threshold,
    }


class BitsAndBytesReader(PackedReader):
    """Reads an NF4 or INT8 checkpoint tensor by tensor.

    Attributes:
        dtype: of decoded INT8 weights, which do not state it; NF4 weights do.
    """

    def __init__(self, checkpoint: Any) -> None:
        super().__init__(checkpoint)
        self.dtype = weight_dtype(checkpoint)
        config = checkpoint.config.get("quantization_config") or {}
        if not (config.get("load_in_4bit") or config.get("load_in_8bit")):
            raise CheckpointError(
                f"{checkpoint.path}: config.json names neither load_in_4bit nor load_in_8bit",
                hint="of bitsandbytes' layouts attar reads NF4 and INT8",
            )

    def is_coded(self, name: str) -> bool:
        nf4 = f"{name}.absmax" in self.checkpoint.tensors
        return name.endswith(".weight") and (nf4 or self._is_int8(name))

    def is_auxiliary(self, name: str) -> bool:
        base, _, leaf = name.rpartition(".")
        int8 = leaf in (SCB, WEIGHT_FORMAT) and f"{base}.weight" in self.checkpoint.tensors
        return ".weight." in name or int8

    def is_transposed(self, name: str) -> bool:
        return self.checkpoint.config.get("model_type") in CONV1D

    def weight_header(self, name: str) -> tuple[str, str, tuple[int, int]]:
        if self._is_int8(name):
            return name, stored_dtype(self.dtype), self.checkpoint.tensors[name].shape
        state = self._state(name)
        rows, columns = state["shape"]
        return name, stored_dtype(getattr(torch, state["dtype"])), (rows, columns)

    def weight(self, name: str) -> Tensor:
        if self._is_int8(name):
            return self._int8(name, lambda tensors: decode_int8(tensors, self.dtype))
        self._state(name)
        try:
            return decode_nf4(self.load_present(name.removesuffix(WEIGHT), NF4))
        except (KeyError, RuntimeError) as error:
            raise self.unfit(name) from error

    def codes(self, name: str) -> tuple[Coded, WeightRule] | None:
        """As in the base class, for INT8; None for NF4, whose levels are not uniform."""
        return (self._int8(name, unpack_int8), INT8_RULE) if self._is_int8(name) else None

    def grid(self, name: str) -> tuple[WeightRule, torch.dtype] | None:
        return (INT8_RULE, torch.float32) if self._is_int8(name) else None

    def check(self, name: str) -> None:
        """As in the base class. An NF4 scale of zero is a block of zeros."""
        if not self.is_coded(name):
            return
        base = name.removesuffix(".weight")
        if self._is_int8(name):
            check_scales(f"{base}.{SCB}", [self.checkpoint.load(f"{base}.{SCB}")])
        for leaf, stored in self.load_present(f"{base}.", (ABSMAX, NESTED)).items():
            scales = stored.float()
            if not (torch.isfinite(scales).all() and (scales >= 0).all() and scales.any()):
                raise NumericsError(
                    f"{base}.{leaf} holds zero, negative or infinite scales", hint="quantize the model again"
                )
        check_codes(base, self.checkpoint.load(name), torch.arange(2.0))  # by the codes alone

    def _int8(self, name: str, read: Callable[[Mapping[str, Tensor]], T]) -> T:
        """``read`` of the tensors of an INT8 weight."""
        try:
            return read(self.load_present(name.removesuffix(WEIGHT), (WEIGHT, SCB, WEIGHT_FORMAT)))
        except (KeyError, ValueError, RuntimeError) as error:
            raise self.unfit(name) from error

    def _is_int8(self, name: str) -> bool:
        """Whether a stored tensor holds the codes of an INT8 weight."""
        info = self.checkpoint.tensors.get(name)
        return name.endswith(".weight") and info is not None and info.dtype == "I8"

    def _state(self, name: str) -> dict[str, Any]:
        """The JSON of an NF4 weight."""
        stored = f"{name.removesuffix(WEIGHT)}{STATE}"
        if stored not in self.checkpoint.tensors:
            raise CheckpointError(
                f"{self.checkpoint.path}: {stored} is missing",
                hint="of bitsandbytes' 4-bit layouts attar reads NF4",
            )
        try:
            state = read_state(self.checkpoint.load(stored))
            return {**state, "shape": [int(size) for size in state["shape"]]}
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{self.checkpoint.path}: {stored} is damaged") from error
