"""The structures of csrc/decode for ctypes, field by field, and the functions of the library.

A structure holds addresses: its creator keeps the tensors alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attar.kernels.build import load
from attar.kernels.packed import PackedWeight

POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
KINDS = {"bf16": 16, "int8": 8, "int4": 4}
ZEROS = {"middle": 0, "points": 1, "products": 2}

Int64s = NDArray[np.int64] | Sequence[int]


class LinearStruct(ctypes.Structure):
    """csrc/decode/linear.h."""

    _fields_ = [
        *((name, POINTER) for name in ("data", "bias", "factors")),
        *((name, LONG) for name in ("rows", "columns")),
        *((name, INT) for name in ("kind", "group", "zeros")),
        ("unit", FLOAT),
        ("sparse", INT),
    ]


NORMS = ("before_attention", "after_attention", "before_mlp", "after_mlp", "query_norm", "key_norm", "sinks")
PRODUCTS = ("qkv", "out", "gate_up", "down")
SCORINGS = {"softmax": 0, "sigmoid": 1}


class MixtureStruct(ctypes.Structure):
    """csrc/decode/model.h."""

    _fields_ = [
        *((name, LONG) for name in ("experts", "active", "groups", "active_groups", "group_scores")),
        *((name, INT) for name in ("scoring", "normalized")),
        ("scaling", FLOAT),
        *((name, POINTER) for name in ("router", "bias", "correction", "shared_gate", "gate_up", "down")),
        *((name, LinearStruct) for name in ("shared_gate_up", "shared_down")),
    ]


class LatentStruct(ctypes.Structure):
    """csrc/decode/model.h."""

    _fields_ = [("query", LinearStruct), *((name, POINTER) for name in ("absorb", "up_keys", "up_values"))]


OFFSETS = ("channels_at", "queries_at", "keys_at", "values_at", "gate_at", "steps_at")
RECURRENCE_SIZES = ("heads", "groups", "keys", "values", *OFFSETS, "norm_size")
RECURRENCE_PRODUCTS = ("first", "steps", "out")


class RecurrenceStruct(ctypes.Structure):
    """csrc/decode/model.h."""

    _fields_ = [
        *((name, LONG) for name in RECURRENCE_SIZES),
        *((name, LinearStruct) for name in RECURRENCE_PRODUCTS),
        *((name, POINTER) for name in ("decay", "step_bias", "skip", "norm")),
        *((name, FLOAT) for name in ("eps", "least", "most")),
        *((name, INT) for name in ("delta", "gated_norm")),
    ]


class LayerStruct(ctypes.Structure):
    """csrc/decode/model.h."""

    _fields_ = [
        *((name, POINTER) for name in (*NORMS, "rotary")),
        ("window", LONG),
        *((name, LinearStruct) for name in PRODUCTS),
        *((name, POINTER) for name in ("mixture", "latents", "kernel", "conv_bias", "recurrence")),
        *((name, LONG) for name in ("index", "state_index")),
    ]


LATENT_SIZES = ("rank", "nope", "wide")
SIZES = ("hidden", "heads", "kv_heads", "head_dim", "rotary", "vocabulary")
FLOATS = ("eps", "scale", "soft_cap", "final_soft_cap", "embedding_scale")


class CacheStruct(ctypes.Structure):
    """csrc/decode/model.h."""

    _fields_ = [
        *((name, LONG) for name in ("kv_heads", "head_dim", "block_size", "blocks", "latent")),
        *((name, POINTER) for name in ("pool", "rotation", "basis")),
        ("kind", INT),
    ]


class ModelStruct(ctypes.Structure):
    """csrc/decode/model.h."""

    _fields_ = [
        *((name, LONG) for name in ("layers", *SIZES, *LATENT_SIZES)),
        *((name, LONG) for name in ("cached", "stateful", "width", "carried")),
        *((name, LONG) for name in ("block_size", "blocks", "embeddings", "context")),
        *((name, FLOAT) for name in (*FLOATS, "latent_eps")),
        *((name, INT) for name in ("activation", "bits", "embedding_kind")),
        *((name, INT) for name in ("wide_norms", "interleaved")),
        *((name, POINTER) for name in ("embedding", "mask", "norm")),
        ("head", LinearStruct),
        *((name, POINTER) for name in ("layer", "hidden_layer", "hidden_pool")),
        ("hidden_states", LONG),
        ("cache", POINTER),
    ]


COUNTS = ("tokens", "spans", "logit_rows", "copies", "block_count", "mask_size", "kept", "saves")
LISTS = ("ids", "positions", "slots", "span", "first", "past", "table", "block", "tree", "mask", "count")
CARRIED = ("again", "history", "states", "save", "save_after", "save_to")


class BatchStruct(ctypes.Structure):
    """csrc/decode/model.h."""

    _fields_ = [
        *((name, LONG) for name in COUNTS),
        *((name, POINTER) for name in (*LISTS, "rows", "copy", "keep", *CARRIED, "inputs", "logits")),
    ]


class DrafterStruct(ctypes.Structure):
    """csrc/decode/draft_block.h."""

    _fields_ = [
        ("context", LinearStruct),
        ("context_norm", POINTER),
        ("rank", LONG),
        ("previous", POINTER),
        ("markov", LinearStruct),
        *((name, POINTER) for name in ("chosen", "confidence", "calibration")),
    ]


class ContextStruct(ctypes.Structure):
    """csrc/decode/draft_block.h."""

    _fields_ = [("count", LONG), *((name, POINTER) for name in ("states", "positions", "slots"))]


ROUND = ("last", "most", "temperature", "least", "key", "token", "count", "survival", "states")


class RoundStruct(ctypes.Structure):
    """csrc/decode/draft_block.h."""

    _fields_ = [("blocks", LONG), ("drafts", LONG), *((name, POINTER) for name in ROUND)]


def linear_struct(packed: PackedWeight) -> LinearStruct:
    """A packed weight as the library reads it."""
    return LinearStruct(
        address(packed.data),
        address(packed.bias),
        address(packed.factors),
        packed.rows,
        packed.columns,
        KINDS[packed.kind],
        packed.group,
        ZEROS[packed.zeros],
        packed.unit,
        packed.form == "2:4",
    )


@dataclass(frozen=True, kw_only=True)
class CarriedSpan:
    """What a sequence carries to its tokens of a step; float32.

    Attributes:
        again: tokens just before these that the states have not seen.
        history: (width - 1 + again, layers, numbers), inputs of the tokens before these; None: zeros.
        states: of recurrences, as they were saved; None: zeros.
        saves: where states are written, each after how many of all tokens, ascending.
    """

    again: int = 0
    history: Tensor | None = None
    states: Tensor | None = None
    saves: Sequence[tuple[int, Tensor]] = ()


NOTHING = CarriedSpan()


@dataclass(frozen=True, kw_only=True)
class StepTokens:
    """The tokens of a step, the tokens of a sequence (a span) contiguous; int64 throughout.

    Attributes:
        ids: (T,).
        positions: (T,), for the rotary embedding.
        slots: (T,), slot s is row s % B of block s // B.
        counts: tokens of each sequence.
        past: keys of each sequence in the cache before this step.
        blocks: block table of each sequence.
        rows: tokens whose logits are returned.
        copies: (from, to) blocks copied before the step.
        trees: per sequence None, or bool (count, count): row's token sees column's token, itself included.
        carried: of each sequence, in a model whose layers carry states.
        keep: tokens whose inputs of such layers are written to ``inputs``.
        inputs: float32 (len(keep), layers, numbers), filled by the step.
    """

    ids: Int64s
    positions: Int64s
    slots: Int64s
    counts: Sequence[int]
    past: Sequence[int]
    blocks: Sequence[Sequence[int]]
    rows: Int64s
    copies: Sequence[tuple[int, int]] = ()
    trees: Sequence[NDArray[np.bool_] | None] = field(default=())
    carried: Sequence[CarriedSpan] = ()
    keep: Int64s = ()
    inputs: Tensor | None = None


def batch_struct(tokens: StepTokens, logits: Tensor) -> tuple[BatchStruct, list[Any]]:
    """The structure of a step, and the arrays that must outlive it."""
    counts, spans = tokens.counts, len(tokens.counts)
    lengths = [len(table) for table in tokens.blocks]
    starts, mask = _tree_masks(tokens)
    total = sum(counts)
    carried = tokens.carried or [NOTHING] * spans
    saves = [save for part in carried for save in part.saves]
    lists = {
        "ids": tokens.ids,
        "positions": tokens.positions,
        "slots": tokens.slots,
        "span": np.repeat(np.arange(spans), counts) if spans > 1 else np.zeros(total),
        "first": _starts(counts),
        "past": tokens.past,
        "table": _starts(lengths),
        "block": [block for table in tokens.blocks for block in table],
        "tree": starts,
        "count": counts,
        "rows": tokens.rows,
        "copy": [block for pair in tokens.copies for block in pair],
        "keep": tokens.keep,
        "again": [part.again for part in carried],
        "history": [address(part.history) or 0 for part in carried],
        "states": [address(part.states) or 0 for part in carried],
        "save": [0, *accumulate(len(part.saves) for part in carried)],
        "save_after": [after for after, _ in saves],
        "save_to": [to.data_ptr() for _, to in saves],
    }
    array, addresses = joined(lists, np.int64)
    lengths_of_tokens = (len(tokens.ids), len(tokens.positions), len(tokens.slots))
    assert lengths_of_tokens == (total,) * 3, (
        f"{lengths_of_tokens} ids, positions, slots for spans of {total}"
    )
    assert len(tokens.past) == len(tokens.blocks) == spans, f"{len(tokens.blocks)} tables of {spans} spans"
    assert len(carried) == spans, f"what {len(carried)} of {spans} spans carry"
    assert len(tokens.trees) in (0, spans), f"{len(tokens.trees)} trees of {spans} spans"
    numbers = [total, spans, len(tokens.rows), len(tokens.copies), sum(lengths), len(mask)]
    numbers += [len(tokens.keep), len(saves)]
    addresses |= {"mask": mask.ctypes.data if len(mask) else None, "logits": logits.data_ptr()}
    addresses["inputs"] = address(tokens.inputs)
    return BatchStruct(*numbers, **addresses), [array, mask]


def joined(
    lists: Mapping[str, Sequence[float] | NDArray[Any]], dtype: type[np.generic]
) -> tuple[NDArray[Any], dict[str, int | None]]:
    """One array of all lists, and the address of each in it: asking an array for its address takes as long
    as filling several."""
    array = np.empty(sum([len(values) for values in lists.values()]), dtype)
    base, size, at = array.ctypes.data, array.itemsize, 0
    addresses: dict[str, int | None] = {}
    for name, values in lists.items():
        stop = at + len(values)
        array[at:stop] = values
        addresses[name], at = base + size * at, stop
    return array, addresses


def _starts(counts: Sequence[int]) -> list[int]:
    """The first index of each of consecutive runs of ``counts`` elements."""
    return [0, *accumulate(counts)][:-1]


NO_MASK = np.empty(0, dtype=np.uint8)


def _tree_masks(tokens: StepTokens) -> tuple[list[int], NDArray[np.uint8]]:
    """Offset of each sequence's tree mask (-1: none) in the concatenation of all masks."""
    if not any(tree is not None for tree in tokens.trees):
        return [-1] * len(tokens.counts), NO_MASK
    starts, masks, size = [], [NO_MASK], 0
    for tree, count in zip(tokens.trees, tokens.counts, strict=True):
        starts.append(-1 if tree is None else size)
        if tree is not None:
            assert tree.shape == (count, count), f"a tree {tree.shape} of {count} tokens"
            masks.append(np.ascontiguousarray(tree, dtype=np.uint8).ravel())
            size += len(masks[-1])
    return starts, np.concatenate(masks)


def address(tensor: Tensor | None) -> int | None:
    """Address of a tensor's data; None for None."""
    return None if tensor is None else tensor.data_ptr()


def library() -> Any | None:
    """The compiled library with the types of its functions; None without a compiler."""
    lib: Any = load("decode")
    if lib is None:
        return None
    lib.attar_thread_pool.argtypes, lib.attar_thread_pool.restype = [INT], POINTER
    lib.attar_thread_pool_free.argtypes, lib.attar_thread_pool_free.restype = [POINTER], None
    lib.attar_multiply.argtypes = [POINTER, POINTER, POINTER, LONG, INT, POINTER]
    lib.attar_multiply.restype = INT
    lib.attar_dot_products.argtypes, lib.attar_dot_products.restype = [], INT
    lib.attar_runner.argtypes, lib.attar_runner.restype = [POINTER, INT], POINTER
    lib.attar_runner_with.argtypes, lib.attar_runner_with.restype = [POINTER, POINTER], POINTER
    lib.attar_write_context.argtypes, lib.attar_write_context.restype = [POINTER] * 3, INT
    lib.attar_draft.argtypes, lib.attar_draft.restype = [POINTER] * 4, INT
    lib.attar_runner_free.argtypes, lib.attar_runner_free.restype = [POINTER], None
    lib.attar_run.argtypes, lib.attar_run.restype = [POINTER, POINTER], INT
    lib.attar_copy_slots.argtypes, lib.attar_copy_slots.restype = [POINTER, POINTER, LONG], INT
    lib.attar_thread_pool_fails.argtypes = [POINTER, LONG, LONG, INT]
    lib.attar_thread_pool_fails.restype = INT
    lib.attar_read.argtypes, lib.attar_read.restype = [POINTER, POINTER, LONG], ctypes.c_uint64
    return lib


OUT_OF_BOUNDS = (
    "spans",
    "token ids",
    "positions",
    "slots",
    "blocks",
    "tree masks",
    "rows of logits",
    "states",
)
"""From code 3 on: csrc/decode/bounds.h."""


def raise_for(code: int, action: str) -> None:
    """Raise the exception for a return code of the library.

    Raises:
        MemoryError: 1.
        IndexError: an argument is out of bounds; nothing was read or written.
        RuntimeError: any other but 0.
    """
    if code == 1:
        raise MemoryError(f"{action}: there is not enough memory")
    if code > 2:
        raise IndexError(f"{action}: {OUT_OF_BOUNDS[code - 3]} out of bounds")
    if code:
        raise RuntimeError(f"{action} failed in the compiled library ({code})")
