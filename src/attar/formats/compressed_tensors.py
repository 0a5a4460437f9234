"""compressed-tensors: the layout that transformers and vLLM load (``quant_method: compressed-tensors``).

``pack-quantized``, for a Linear with weight (N, K), b bits, group size g:

    weight_packed      int32 (N, ceil(K b / 32))     signed code + 2^(b-1), dense_pack along K
    weight_scale       float (N, K / g), (N, 1) for whole rows
    weight_shape       int64 (2,) = N, K
    weight_zero_point  int32 (ceil(N b / 32), K / g)  asymmetric only: signed zero + 2^(b-1), dense_pack along
    N

``naive-quantized``, for an int8 embedding (and the head tied to it): ``weight`` int8 (V, D) and
``weight_scale`` (V, 1). A tied head stores a scale of its own and no weight: transformers ties the int8
weight and then decodes embedding and head each with its scale. A decoded weight is the code times the scale,
rounded once to the type of the scale.

A Conv1D (GPT-2) stores its weight transposed, and transformers' reader of this format passes Conv1D by,
leaving random weights. Such a checkpoint is written with ``format: attar-transposed``, which that reader
refuses by name; attar itself reads it, and exports it dense.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attar.errors import CheckpointError
from attar.formats.dense_pack import dense_pack, dense_unpack

TRANSPOSED = "attar-transposed"
PACKED, SCALE, SHAPE, ZERO = "weight_packed", "weight_scale", "weight_shape", "weight_zero_point"


@dataclass(frozen=True)
class Integers:
    """A weight as whole numbers, the way every integer format sees it.

    Attributes:
        codes: int8 (N, K), signed.
        scale: float32 (N, G).
        zero: float32 (N, G) signed whole numbers, or None.
        bits: b.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int


def encode(weight: Integers, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a Linear, by the last part of their names; scales in ``dtype``."""
    offset = 2 ** (weight.bits - 1)
    tensors = {
        PACKED: dense_pack(weight.codes.to(torch.int16) + offset, weight.bits),
        SCALE: weight.scale.to(dtype),
        SHAPE: torch.tensor(weight.codes.shape, dtype=torch.int64),
    }
    if weight.zero is not None:
        tensors[ZERO] = dense_pack((weight.zero + offset).T.to(torch.int16), weight.bits).T.contiguous()
    return tensors


def encoded_layout(
    shape: Sequence[int], groups: int, bits: int, dtype: str, zero: bool = False
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of the tensors that :func:`encode` makes, known before any weight is."""
    rows, columns = shape
    layout = {
        PACKED: ("I32", (rows, -(-columns * bits // 32))),
        SCALE: (dtype, (rows, groups)),
        SHAPE: ("I64", (2,)),
    }
    if zero:
        layout[ZERO] = ("I32", (-(-rows * bits // 32), groups))
    return layout


def decode(tensors: dict[str, Tensor], bits: int) -> Tensor:
    """The weight (N, K) of a packed Linear, in the type of its scale."""
    rows, columns = (int(size) for size in tensors[SHAPE])
    offset = 2 ** (bits - 1)
    codes = dense_unpack(tensors[PACKED], bits, columns).to(torch.int16) - offset
    scale = tensors[SCALE]
    grouped = codes.reshape(rows, scale.shape[1], -1).float()
    if ZERO in tensors:
        zero = dense_unpack(tensors[ZERO].T.contiguous(), bits, rows).T.to(torch.int16) - offset
        grouped = grouped - zero.float()[..., None]
    return (grouped * scale.float()[..., None]).to(scale.dtype).reshape(rows, columns)


def weights_config(bits: int, group_size: int, symmetric: bool = True) -> dict[str, Any]:
    """The ``weights`` entry of a config group."""
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group_size else "channel",
        "group_size": group_size or None,
        "dynamic": False,
    }


def quantization_config(
    *,
    bits: int,
    group_size: int,
    ignore: Sequence[str],
    symmetric: bool = True,
    embedding: bool = False,
    tied_head: str | None = None,
    transposed: bool = False,
) -> dict[str, Any]:
    """The ``quantization_config`` of config.json.

    Args:
        ignore: modules that keep their dense weight.
        embedding: the embedding is int8.
        tied_head: name of the head when it shares the int8 embedding.
        transposed: the Linears are Conv1D modules.
    """
    packed = TRANSPOSED if transposed else "pack-quantized"
    groups: dict[str, Any] = {
        "group_0": {
            "targets": ["Linear"],
            "format": packed,
            "weights": weights_config(bits, group_size, symmetric),
        }
    }
    if embedding:
        targets = ["Embedding"] + ([f"re:.*{re.escape(tied_head)}$"] if tied_head else [])
        groups["group_1"] = {"targets": targets, "format": "naive-quantized", "weights": weights_config(8, 0)}
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if embedding and not transposed else packed,
        "quantization_status": "compressed",
        "ignore": [name for name in ignore if name != tied_head or not embedding],
        "config_groups": groups,
    }


def is_packed(config: dict[str, Any]) -> bool:
    """Whether a model's config says that its weights are in this layout."""
    return (config.get("quantization_config") or {}).get("quant_method") == "compressed-tensors"


def dequantize_state(checkpoint: Any) -> dict[str, Tensor]:
    """Every tensor of a packed checkpoint, decoded to dense ones under the names of the unquantized model.

    Raises:
        CheckpointError: a tensor of a packed Linear is missing, or the layout is another one.
    """
    state: dict[str, Tensor] = {}
    for name in checkpoint.tensors:
        tensor = dense_tensor(checkpoint, name)
        if tensor is not None:
            state[_dense_name(name)] = tensor
    return state


def _dense_name(name: str) -> str:
    return name.removesuffix("_packed")


def dense_tensor(checkpoint: Any, name: str) -> Tensor | None:
    """What a stored tensor stands for: a decoded weight for a code tensor, None for scales and shapes, itself
    otherwise."""
    config = checkpoint.config.get("quantization_config") or {}
    base, _, leaf = name.rpartition(".")
    if leaf in (SCALE, SHAPE, ZERO):
        return None
    if leaf == PACKED:
        found = {
            part: f"{base}.{part}"
            for part in (PACKED, SCALE, SHAPE, ZERO)
            if f"{base}.{part}" in checkpoint.tensors
        }
        for part in (SCALE, SHAPE):
            if part not in found:
                raise CheckpointError(
                    f"{checkpoint.path}: {base}.{part} is missing", hint="the packed checkpoint is incomplete"
                )
        bits = int(config["config_groups"]["group_0"]["weights"]["num_bits"])
        weight = decode({part: checkpoint.load(full) for part, full in found.items()}, bits)
        return weight.T.contiguous() if config.get("format") == TRANSPOSED else weight
    tensor: Tensor = checkpoint.load(name)
    if tensor.dtype == torch.int8 and f"{base}.{SCALE}" in checkpoint.tensors:
        scale = checkpoint.load(f"{base}.{SCALE}")
        return (tensor.float() * scale.float()).to(scale.dtype)
    return tensor
