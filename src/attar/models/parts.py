"""Descriptions of a transformer's parts: linear layers, attention, MLP, block, and the whole anatomy.

Plain data: names of modules and numbers. All names are full paths below the model that was looked at, so
``model.get_submodule(part.name)`` gives the module. Rows and columns are those of a Linear, whose weight is
(out, in); a Conv1D stores (in, out), see :func:`weight_of`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn


@dataclass(frozen=True)
class Projection:
    """One projection: a module of its own, or its part of a fused module.

    Attributes:
        name: path of the module that holds the weight.
        kind: ``"linear"``, weight (out, in), or ``"conv1d"``, weight (in, out).
        out_features: output rows of this projection (in a fused module: of its part alone).
        in_features: input columns.
        rows: first run [start, stop) of output rows inside a fused weight; None when the module is its own.
        period: where the projections of a fused weight alternate group by group, the rows from one run to the
            next; None when ``rows`` is the only run.
    """

    name: str
    kind: str
    out_features: int
    in_features: int
    rows: tuple[int, int] | None = None
    period: int | None = None

    @property
    def fused(self) -> bool:
        """Whether the module holds other projections as well."""
        return self.rows is not None

    def run(self, group: int, groups: int) -> range:
        """Stored rows of part ``group`` when this projection is divided into ``groups`` equal parts."""
        size = self.out_features // groups
        start = self.rows[0] if self.rows else 0
        first = start + group * (self.period or size)
        return range(first, first + size)

    def stored_rows(self) -> list[int]:
        """All rows of the stored weight that belong to this projection, in its own order."""
        if self.rows is None:
            return list(range(self.out_features))
        run = self.rows[1] - self.rows[0]
        groups = self.out_features // run
        return [row for group in range(groups) for row in self.run(group, groups)]


class KVGroup(NamedTuple):
    """What belongs to one KV head: rows of the stored q, k and v weights, and input columns of o."""

    q_rows: range
    k_rows: range
    v_rows: range
    o_columns: range


@dataclass(frozen=True)
class Attention:
    """Self-attention of one block.

    Query head ``h`` reads KV head ``h // (heads // kv_heads)``. ``name`` is the module that holds the q
    projection; ``norms`` are norms of single heads (q_norm, k_norm).
    """

    name: str
    q: Projection
    k: Projection
    v: Projection
    o: Projection
    heads: int
    kv_heads: int
    head_dim: int
    norms: tuple[str, ...] = ()

    def groups(self) -> list[KVGroup]:
        """One :class:`KVGroup` for each KV head: the smallest piece that can be removed."""
        n, width = self.kv_heads, self.o.in_features // self.kv_heads
        return [
            KVGroup(self.q.run(g, n), self.k.run(g, n), self.v.run(g, n), range(g * width, (g + 1) * width))
            for g in range(n)
        ]

    def query_rows(self, head: int) -> range:
        """Rows of the stored q weight of one query head."""
        size = self.heads // self.kv_heads
        start = head % size * self.head_dim
        return self.q.run(head // size, self.kv_heads)[start : start + self.head_dim]

    def query_columns(self, head: int) -> range:
        """Input columns of o of one query head."""
        return range(head * self.head_dim, (head + 1) * self.head_dim)


@dataclass(frozen=True)
class Mlp:
    """The feed-forward part of a block: ``down(act(up(x)))``, or ``down(act(gate(x)) * up(x))`` where gated.

    Neuron ``j`` is row ``j`` of up (and of gate) and input column ``j`` of down. ``activation`` is the name
    the config gives. ``name`` is the module that holds both up and down.
    """

    name: str
    up: Projection
    gate: Projection | None
    down: Projection
    neurons: int
    activation: str


@dataclass(frozen=True)
class Block:
    """One layer.

    Attributes:
        index: its position in the stack.
        name: its path; ``module`` is the module itself.
        norms: paths of its norms over the residual stream, in the order they were registered.
        linears: paths of all its Linear and Conv1D modules, each once, in forward order.
    """

    index: int
    name: str
    module: nn.Module = field(repr=False, compare=False)
    attention: Attention
    mlp: Mlp
    norms: tuple[str, ...]
    linears: tuple[str, ...]


@dataclass(frozen=True)
class Anatomy:
    """Where everything is in a model.

    Attributes:
        family: ``config.model_type``.
        causal: whether attention sees the past only.
        blocks: the layers in order.
        blocks_name: path of their list (``"model.layers"``).
        positions: learned position embedding, if any.
        head: projection to the vocabulary, if any.
        tied: whether the head's weight is the embedding's.
    """

    family: str
    causal: bool
    blocks: tuple[Block, ...]
    blocks_name: str
    embedding: str
    positions: str | None
    final_norm: str | None
    head: str | None
    tied: bool
    hidden_size: int
    vocab_size: int


def weight_of(module: nn.Module) -> Tensor:
    """The weight (N, K) of a Linear, Embedding or Conv1D (stored transposed), a view of the parameter."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight if isinstance(module, nn.Linear | nn.Embedding) else weight.T


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches a module: its name, the end of its name, or a ``re:`` regular expression."""
    if pattern.startswith("re:"):
        return re.search(pattern[3:], name) is not None
    return name == pattern or name.endswith(f".{pattern}")
