"""The structures of csrc/decode for ctypes, field by field, and what the library exports.

A structure holds addresses: whoever fills one in keeps the tensors behind it alive.
"""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

from attar.kernels.build import load
from attar.kernels.packed import Packed

POINTER, LONG, WHOLE, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
KINDS = {"bf16": 16, "int8": 8, "int4": 4}
ZEROS = {"middle": 0, "points": 1, "products": 2}


class Linear(ctypes.Structure):
    """csrc/decode/linear.h."""

    _fields_ = [
        *((name, POINTER) for name in ("data", "bias")),
        *((name, LONG) for name in ("rows", "columns")),
        *((name, WHOLE) for name in ("kind", "group", "zeros")),
        ("unit", FLOAT),
    ]


NORMS = ("before_attention", "after_attention", "before_mlp", "after_mlp", "query_norm", "key_norm")
PRODUCTS = ("qkv", "out", "gate_up", "down")


class Layer(ctypes.Structure):
    """csrc/decode/model.h."""

    _fields_ = [
        *((name, POINTER) for name in (*NORMS, "rotary")),
        ("window", LONG),
        *((name, Linear) for name in PRODUCTS),
    ]


SIZES = ("hidden", "heads", "kv_heads", "head_dim", "rotary", "intermediate", "vocabulary")
FLOATS = ("eps", "scale", "soft_cap", "final_soft_cap", "embedding_scale")


class Model(ctypes.Structure):
    """csrc/decode/model.h."""

    _fields_ = [
        *((name, LONG) for name in ("layers", *SIZES, "block_size", "blocks")),
        *((name, FLOAT) for name in FLOATS),
        *((name, WHOLE) for name in ("activation", "bits", "pool_kind", "embedding_kind")),
        *((name, POINTER) for name in ("embedding", "norm")),
        ("head", Linear),
        *((name, POINTER) for name in ("layer", "pool")),
    ]


COUNTS = ("tokens", "spans", "wanted", "copies")
LISTS = ("ids", "positions", "slots", "span", "first", "place", "table", "block", "tree", "mask", "count")


class Batch(ctypes.Structure):
    """csrc/decode/model.h."""

    _fields_ = [
        *((name, LONG) for name in COUNTS),
        *((name, POINTER) for name in (*LISTS, "rows", "copy", "logits")),
    ]


def linear(packed: Packed) -> Linear:
    """A packed weight for the library."""
    return Linear(
        address(packed.data),
        address(packed.bias),
        packed.rows,
        packed.columns,
        KINDS[packed.kind],
        packed.group,
        ZEROS[packed.zeros],
        packed.unit,
    )


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's numbers are; None for none."""
    return None if tensor is None else tensor.data_ptr()


def library() -> Any | None:
    """The compiled library with the types of its functions; None where there is no compiler."""
    found: Any = load("decode")
    if found is None:
        return None
    found.attar_team.argtypes, found.attar_team.restype = [WHOLE], POINTER
    found.attar_team_free.argtypes, found.attar_team_free.restype = [POINTER], None
    found.attar_multiply.argtypes = [POINTER, POINTER, POINTER, LONG, WHOLE, POINTER]
    found.attar_multiply.restype = WHOLE
    found.attar_dot_products.argtypes, found.attar_dot_products.restype = [], WHOLE
    found.attar_runner.argtypes, found.attar_runner.restype = [POINTER, WHOLE], POINTER
    found.attar_runner_free.argtypes, found.attar_runner_free.restype = [POINTER], None
    found.attar_run.argtypes, found.attar_run.restype = [POINTER, POINTER], WHOLE
    found.attar_move.argtypes, found.attar_move.restype = [POINTER, POINTER, LONG], None
    found.attar_team_fails.argtypes, found.attar_team_fails.restype = [POINTER, LONG, LONG, WHOLE], WHOLE
    found.attar_read.argtypes, found.attar_read.restype = [POINTER, POINTER, LONG], ctypes.c_uint64
    return found


def raise_for(code: int, what: str) -> None:
    """What the library's numbers mean.

    Raises:
        MemoryError: 1.
        RuntimeError: any other but 0.
    """
    if code == 1:
        raise MemoryError(f"{what}: there is not enough memory")
    if code:
        raise RuntimeError(f"{what} failed in the compiled library ({code})")
