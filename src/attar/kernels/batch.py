"""The tokens of a step, and the structure that the library reads them from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attar.kernels import structures

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens of a step, those of a sequence together; whole numbers throughout.

    Attributes:
        ids: (T,).
        positions: (T,), for the rotary embedding.
        slots: (T,), slot s is row s % B of block s // B.
        counts: tokens of each sequence.
        places: places of its block table in use before.
        blocks: its block table.
        rows: tokens whose logits are wanted.
        copies: (from, to) blocks copied first.
        trees: per sequence None, or bool (count, count): which of its tokens each sees, itself among them.
    """

    ids: Integers
    positions: Integers
    slots: Integers
    counts: Sequence[int]
    places: Sequence[int]
    blocks: Sequence[Sequence[int]]
    rows: Integers
    copies: Sequence[tuple[int, int]] = ()
    trees: Sequence[NDArray[np.bool_] | None] = field(default=())


def structure(tokens: Tokens, logits: Tensor) -> tuple[structures.Batch, list[Any]]:
    """The structure, and what must live as long as it is used."""
    counts, spans = np.asarray(tokens.counts, dtype=np.int64), len(tokens.counts)
    ends = np.cumsum(counts)
    lengths = np.array([len(table) for table in tokens.blocks], dtype=np.int64)
    starts, mask = _masks(tokens)
    lists = {
        "ids": tokens.ids,
        "positions": tokens.positions,
        "slots": tokens.slots,
        "span": np.repeat(np.arange(spans), counts),
        "first": ends - counts,
        "place": tokens.places,
        "table": np.cumsum(lengths) - lengths,
        "block": [block for table in tokens.blocks for block in table],
        "tree": starts,
        "count": counts,
        "rows": tokens.rows,
        "copy": [block for pair in tokens.copies for block in pair],
    }
    arrays = {name: np.ascontiguousarray(value, dtype=np.int64) for name, value in lists.items()}
    assert len(arrays["ids"]) == int(counts.sum()), f"{len(arrays['ids'])} tokens for spans of {counts.sum()}"
    places = {name: array.ctypes.data for name, array in arrays.items()}
    sizes = (len(arrays["ids"]), spans, len(arrays["rows"]), len(tokens.copies))
    found = structures.Batch(*sizes, mask=mask.ctypes.data, logits=logits.data_ptr(), **places)
    return found, [arrays, mask]


def _masks(tokens: Tokens) -> tuple[list[int], NDArray[np.uint8]]:
    """Where each sequence's mask begins (-1: none), and all masks one after the other."""
    starts, parts, size = [], [np.empty(0, dtype=np.uint8)], 0
    for tree in tokens.trees or [None] * len(tokens.counts):
        starts.append(-1 if tree is None else size)
        if tree is not None:
            parts.append(np.ascontiguousarray(tree, dtype=np.uint8).ravel())
            size += len(parts[-1])
    return starts, np.concatenate(parts)
