"""Descriptions of a transformer's parts: linear layers, attention, MLP, block, and the whole anatomy.

Plain data: names of modules and numbers. All names are full paths below the model that was looked at, so
``model.get_submodule(part.name)`` gives the module. Rows and columns are those of a Linear, whose weight is
(out, in); a Conv1D stores (in, out), see :func:`weight_of`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn

from attar.errors import ModelError
from attar.patterns import search

DENSE_ONLY = "attar cuts and transforms blocks of one self-attention and one dense MLP"


@dataclass(frozen=True)
class Projection:
    """One projection: a module, or a part of a fused module.

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
    projection; ``norms`` are norms of single heads (q_norm, k_norm); ``sinks`` is a learned logit of each
    head that takes attention from the tokens (gpt-oss).
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
    sinks: str | None = None

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
class LatentAttention:
    """Attention whose keys and values come from one small vector a token (MLA, arXiv:2405.04434, 2.1).

    Attributes:
        q: the one projection of the queries, or the two around their own small vector, in forward order.
        kv_a: from the hidden state to the small vector and the rotary part of the key.
        kv_b: from the small vector to the keys and values of all heads.
    """

    name: str
    q: tuple[Projection, ...]
    kv_a: Projection
    kv_b: Projection
    o: Projection
    heads: int
    norms: tuple[str, ...] = ()


@dataclass(frozen=True)
class NonAttentionMixer:
    """What takes the place of self-attention, or stands beside it, and is not taken apart further.

    Attributes:
        kind: ``"state space"``, ``"linear attention"``, ``"convolution"``, ``"gated attention"``, or two of
            them joined by ``and``; ``"attention and no MLP"`` or ``"nothing"`` where a block has one part.
        name: path of the module.
        linears: paths of its Linears.
    """

    kind: str
    name: str
    linears: tuple[str, ...]


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts: the router gives each token to ``active`` of ``count`` experts.

    One can rely on: ``experts[e]`` is expert e of the router's row e, an :class:`Mlp` whose projections are
    Linears of their own (``gate.name``, ``up.name``, ``down.name``), of one size for every e. In a model that
    transformers made the experts are stacked in 3-D parameters, and ``experts`` is empty until
    :func:`attar.models.loading.experts.unstack` has put Linears in their place. The router and the gate of
    the shared expert are not among a block's ``linears``.

    Attributes:
        name: path of the module that holds router and experts.
        holder: path of the module that holds the experts, called with all tokens.
        router: path of the module whose ``weight`` is (count, hidden).
        shared: the expert that every token goes through, if any (several of them are one wider Mlp).
        shared_gate: path of the Linear with one row that scales it, if any.
    """

    name: str
    holder: str
    router: str
    count: int
    active: int
    experts: tuple[Mlp, ...]
    shared: Mlp | None = None
    shared_gate: str | None = None

    @property
    def dense(self) -> tuple[str, ...]:
        """Paths of what chooses experts: router and shared gate."""
        return (self.router, *([self.shared_gate] if self.shared_gate else []))

    @property
    def linears(self) -> list[str]:
        """Paths of the experts' Linears, expert by expert, not those of the shared one."""
        parts = [(e.gate, e.up, e.down) for e in self.experts]
        return [part.name for expert in parts for part in expert if part is not None]


@dataclass(frozen=True)
class Block:
    """One layer.

    Attributes:
        index: its position in the stack.
        name: its path; ``module`` is the module itself.
        mixer: how tokens see each other; :attr:`attention` where it must be plain self-attention.
        feed_forward: :attr:`mlp` where it must be dense; None: the layer has none.
        norms: paths of its norms over the residual stream, in the order they were registered.
        linears: paths of all its Linear and Conv1D modules, each once, in forward order, but for routers and
            shared gates.
    """

    index: int
    name: str
    module: nn.Module = field(repr=False, compare=False)
    mixer: Attention | LatentAttention | NonAttentionMixer
    feed_forward: Mlp | Mixture | None
    norms: tuple[str, ...]
    linears: tuple[str, ...]

    @property
    def attention(self) -> Attention:
        """Its self-attention.

        Raises:
            ModelError: the block has something else; names it.
        """
        if isinstance(self.mixer, Attention):
            return self.mixer
        kind = self.mixer.kind if isinstance(self.mixer, NonAttentionMixer) else "latent attention (MLA)"
        raise ModelError(f"{self.name} has {kind} instead of plain self-attention", hint=DENSE_ONLY)

    @property
    def mlp(self) -> Mlp:
        """Its dense MLP.

        Raises:
            ModelError: the block has a mixture of experts, or nothing.
        """
        if isinstance(self.feed_forward, Mlp):
            return self.feed_forward
        kind = "no MLP" if self.feed_forward is None else "a mixture of experts instead of a dense MLP"
        raise ModelError(f"{self.name} has {kind}", hint=DENSE_ONLY)

    @property
    def mixture(self) -> Mixture | None:
        """Its mixture of experts, if it has one."""
        return self.feed_forward if isinstance(self.feed_forward, Mixture) else None

    def fused(self, qkv: bool = True) -> list[list[str]]:
        """Linears that engines run as one matrix: q, k and v (``qkv``); the first two projections of MLA;
        gate and up of each MLP."""
        parts: list[list[Projection | None]] = []
        if isinstance(self.mixer, Attention) and qkv:
            parts.append([self.mixer.q, self.mixer.k, self.mixer.v])
        elif isinstance(self.mixer, LatentAttention) and qkv and len(self.mixer.q) > 1:
            parts.append([self.mixer.q[0], self.mixer.kv_a])
        mixture = self.mixture
        mlps = [*mixture.experts, mixture.shared] if mixture else [self.feed_forward]
        parts += [[mlp.gate, mlp.up] for mlp in mlps if isinstance(mlp, Mlp)]
        return [list(dict.fromkeys(part.name for part in group if part is not None)) for group in parts]


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
        return search(pattern[3:], name)
    return name == pattern or name.endswith(f".{pattern}")
