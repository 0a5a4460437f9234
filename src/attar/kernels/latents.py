"""Latent attention (MLA) as the compiled step reads it: what makes queries, keys and values of latents.

csrc/decode/latents.h has the formulas, runtime/runner/latent.py those of the modules.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from attar.errors import ModelError
from attar.kernels import structures
from attar.kernels.packed import PackedWeight

Latents = tuple[structures.LatentStruct, Any] | None
"""Latent attention as the library reads it, with the arrays of its matrices, which must outlive it."""

LANES = 16  # numbers in a vector


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Sizes of all layers.

    Attributes:
        rank: numbers of a latent.
        nope: of a head's query that positions do not turn; head_dim is these and the rotated ones.
        wide: of a head's value.
        eps: of the norms of queries' and keys' latents.
        interleaved: positions turn neighbours (2 i, 2 i + 1), not halves.
    """

    rank: int
    nope: int
    wide: int
    eps: float
    interleaved: bool


@dataclass(frozen=True, kw_only=True)
class LatentWeights:
    """A layer's. U and V are the parts of ``kv_b_proj``; a matrix for each head.

    Attributes:
        absorb: U^T (rank, nope), bfloat16.
        up_keys: U (nope, rank).
        up_values: V (wide, rank).
        query: (heads head_dim, query rank), of normed latents of queries; None: there are none.
    """

    absorb: tuple[PackedWeight, ...]
    up_keys: tuple[PackedWeight, ...]
    up_values: tuple[PackedWeight, ...]
    query: PackedWeight | None = None

    @property
    def products(self) -> list[PackedWeight]:
        """All packed weights."""
        query = [] if self.query is None else [self.query]
        return [*query, *self.absorb, *self.up_keys, *self.up_values]

    @property
    def read_bytes(self) -> int:
        """Bytes that one token reads, whose queries are absorbed."""
        query = 0 if self.query is None else self.query.nbytes
        return query + sum(packed.nbytes for packed in (*self.absorb, *self.up_values))


def latent_struct(weights: LatentWeights | None) -> Latents:
    """A layer's as the library reads it."""
    if weights is None:
        return None
    result, kept = structures.LatentStruct(), []
    for name in ("absorb", "up_keys", "up_values"):
        parts = getattr(weights, name)
        kept.append((structures.LinearStruct * len(parts))(*map(structures.linear_struct, parts)))
        setattr(result, name, ctypes.addressof(kept[-1]))
    if weights.query is not None:
        result.query = structures.linear_struct(weights.query)
    return result, kept


def check_latents(
    weights: LatentWeights, shape: LatentShape, *, heads: int, head_dim: int, query_rank: int
) -> None:
    """What the library does not check.

    Args:
        query_rank: rows of the first product that are queries or their latents.

    Raises:
        ModelError: matrices of other shapes.
    """
    if shape.rank % LANES or head_dim % 2 or shape.nope % 2:
        raise ModelError(
            f"latents of {shape.rank} numbers for heads of {shape.nope} + {head_dim - shape.nope}"
        )
    shapes = {
        "absorb": (shape.rank, shape.nope),
        "up_keys": (shape.nope, shape.rank),
        "up_values": (shape.wide, shape.rank),
    }
    for name, expected in shapes.items():
        parts = getattr(weights, name)
        kinds = {(p.rows, p.columns, p.kind, p.group, p.zeros) for p in parts}
        if len(parts) != heads or len(kinds) != 1 or (parts[0].rows, parts[0].columns) != expected:
            raise ModelError(f"{len(parts)} heads with {name} {sorted(kinds)[:2]}, not {heads} {expected}")
    query, queries = weights.query, heads * head_dim
    actual = (query_rank, 0) if query is None else (query.rows, query.columns)
    if actual != ((queries, 0) if query is None else (queries, query_rank)):
        raise ModelError(f"queries of {actual}, not {queries} from {query_rank}")
