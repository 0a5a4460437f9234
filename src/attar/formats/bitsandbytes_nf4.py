"""bitsandbytes' NF4: 4-bit weights under scales of 64 (``quant_method: bitsandbytes``, ``load_in_4bit``).

For a Linear with weight (N, K), cut row by row into blocks of ``blocksize`` values:

    weight                    uint8 (ceil(N K / 2), 1): codes row by row, the first in the high nibble
    weight.absmax             float32 (blocks,), or uint8 where the scales are coded themselves
    weight.quant_map          float32 (16,): the levels
    weight.nested_absmax      float32 (ceil(blocks / 256),)
    weight.nested_quant_map   float32 (256,)
    weight.quant_state.bitsandbytes__nf4
                              uint8: JSON of quant_type, blocksize, dtype, shape; where scales are coded also
                              of nested_blocksize, nested_dtype, nested_offset

A decoded weight is level times scale in float32, rounded once to ``dtype``; a coded scale is
nested_quant_map[code] * nested_absmax + nested_offset. The JSON is filled up with spaces to a length that is
known beforehand. A Conv1D's weight is stored as (N, K), as transformers expects it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

NESTED_BLOCK = 256  # scales that share a scale
NUMBER = 24  # characters of a float64 at most
STATE = "weight.quant_state.bitsandbytes__nf4"
ABSMAX, MAP, NESTED, NESTED_MAP = (
    "weight.absmax",
    "weight.quant_map",
    "weight.nested_absmax",
    "weight.nested_quant_map",
)


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
        dtype: in which a reader gets the weight.
        nested: where the scales are coded: ``absmax_codes`` (N, K / blocksize), ``nested_absmax``,
            ``nested_map`` and ``nested_offset``.
    """
    rows, columns = codes.shape
    flat = torch.nn.functional.pad(codes.to(torch.uint8).reshape(-1), (0, rows * columns % 2))
    state = _state_json((rows, columns), columns // scale.shape[1], dtype, None)
    tensors = {"weight": (flat[0::2] << 4 | flat[1::2])[:, None], MAP: levels.float()}
    if nested:
        offset = float(nested["nested_offset"])
        state = _state_json((rows, columns), columns // scale.shape[1], dtype, offset)
        tensors[ABSMAX] = nested["absmax_codes"].reshape(-1)
        tensors[NESTED], tensors[NESTED_MAP] = nested["nested_absmax"].float(), nested["nested_map"].float()
    else:
        tensors[ABSMAX] = scale.float().reshape(-1)
    return {**tensors, STATE: torch.tensor(list(state), dtype=torch.uint8)}


def layout_nf4(
    shape: tuple[int, int], blocksize: int, dtype: torch.dtype, double: bool
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of the tensors that :func:`encode_nf4` makes, known before any weight is."""
    count = shape[0] * shape[1]
    blocks = -(-count // blocksize)
    made: dict[str, tuple[str, tuple[int, ...]]] = {
        "weight": ("U8", (-(-count // 2), 1)),
        ABSMAX: ("U8" if double else "F32", (blocks,)),
        MAP: ("F32", (16,)),
    }
    if double:
        made[NESTED], made[NESTED_MAP] = ("F32", (-(-blocks // NESTED_BLOCK),)), ("F32", (256,))
    made[STATE] = ("U8", (len(_state_json(shape, blocksize, dtype, 0.0 if double else None)),))
    return made


def _state_json(shape: tuple[int, int], blocksize: int, dtype: torch.dtype, offset: float | None) -> bytes:
    """The JSON, in bitsandbytes' order; with an offset always of the same length."""
    said: dict[str, Any] = {"quant_type": "nf4", "blocksize": blocksize}
    said |= {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape)}
    if offset is None:
        return json.dumps(said).encode()
    said |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": 0.0}
    length = len(json.dumps(said)) - len(json.dumps(0.0)) + NUMBER
    return json.dumps({**said, "nested_offset": offset}).ljust(length).encode()


def decode_nf4(tensors: Mapping[str, Tensor]) -> Tensor:
    """The weight (N, K) of a Linear, in the type that its state names.

    Args:
        tensors: by the last parts of their names.
    """
    state = read_state(tensors[STATE])
    count = state["shape"][0] * state["shape"][1]
    packed = tensors["weight"].reshape(-1).view(torch.uint8)
    codes = torch.stack((packed >> 4, packed & 15), 1).reshape(-1)[:count]
    scale = _scales(tensors, state)
    values = torch.nn.functional.pad(tensors[MAP].float()[codes.int()], (0, -count % state["blocksize"]))
    values = (values.reshape(-1, state["blocksize"]) * scale[:, None]).reshape(-1)[:count]
    return values.to(getattr(torch, state["dtype"])).reshape(state["shape"])


def _scales(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Tensor:
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
        said = json.loads(bytes(stored.tolist()).decode())
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(said, dict):
        raise ValueError("not an object")
    return said


def nf4_config(ignore: list[str], dtype: torch.dtype, double: bool) -> dict[str, Any]:
    """The ``nf4_config`` of config.json.

    Args:
        ignore: Linears that keep their dense weight.
        dtype: in which the reader computes.
        double: the scales are coded.
    """
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": double,
        "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": list(ignore),
    }
