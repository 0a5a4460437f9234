"""Drafts: proposed tokens as a tree, and the distributions they were drawn from.

    index      0 is the last decided token, drafts are 1..n; the row of logits, and of p, after each
    parent     of a draft the index it follows, smaller than its own; a chain is 0, 1, 2, ...
    path       indices from the first draft down to a node, in order

The rule is how the drafts after one node were chosen, and decides how they must be verified:

    fixed      deterministic: suffix trees, argmax, the k likeliest, trained heads. There is no q, even if the
               proposer has probabilities: an argmax was not drawn from the softmax
    iid        drawn from q independently; equal siblings are possible, and both count
    distinct   drawn from q without replacement (Gumbel top-k), in the order drawn

q_i is the distribution, after the warps, that the token of draft i was drawn from; siblings share it. Whether
a draft of the last two rules is in the tree may depend on earlier draws and on those above it, never on its
own token or a later one: stopping at a doubtful prefix is allowed, dropping a doubtful draw is not.

The acceptance of a draft is counted under its kind, a group and a level in it from 1: for a chain of a draft
model the level is the depth, for suffix trees it grows with the tokens that match.

Letters: n drafts, V vocabulary of the proposer, p and q distributions of target and draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

LEVELS = 32

DraftRule = Literal["fixed", "iid", "distinct"]
Floats = NDArray[np.floating]


@dataclass(frozen=True, eq=False)
class Draft:
    """Tokens proposed after the last decided one.

    Args:
        tokens: x_1..x_n, at least one.
        parents: index of each draft's parent, smaller than its own.
        q: float32 (n, V), or n rows (V,) that siblings may share; None where the rule is fixed.
        rule: how the drafts after one node were chosen.
        kinds: what the acceptance of each draft is counted under; None: its depth.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    q: Floats | Sequence[Floats] | None = None
    rule: DraftRule = "fixed"
    kinds: tuple[int, ...] | None = None

    @classmethod
    def chain(cls, tokens: Iterable[int], q: Floats | Sequence[Floats] | None = None) -> Draft:
        """Tokens one after the other: drawn from q, or fixed where there is none."""
        tokens = tuple(tokens)
        return cls(tokens, tuple(range(len(tokens))), q, "fixed" if q is None else "iid")

    def __len__(self) -> int:
        """n."""
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(len(self)))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Of indices 0..n: 0 for the last decided token, 1 for its children."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Drafts at depth 1, 2, ..."""
        return tuple(np.bincount(self.depths)[1:].tolist())

    def children(self, node: int) -> tuple[int, ...]:
        """Drafts that follow a node, in their order."""
        return self._children[node]

    def path(self, node: int) -> tuple[int, ...]:
        """Indices from depth 1 down to the node; empty for 0."""
        nodes = []
        while node:
            nodes.append(node)
            node = self.parents[node - 1]
        return tuple(reversed(nodes))

    def path_tokens(self, path: Iterable[int]) -> tuple[int, ...]:
        """Tokens of the drafts of a path."""
        return tuple(self.tokens[node - 1] for node in path)

    def pruned(self, nodes: Sequence[int]) -> Draft | None:
        """Only these nodes, which must include their parents; None where there are none.

        Only fixed drafts may be pruned: with a q the choice must not depend on the tokens.
        """
        nodes = sorted(nodes)
        if len(nodes) in (0, len(self)):
            return self if nodes else None
        assert self.q is None, "a drawn draft is not pruned"
        index = {0: 0, **{node: new for new, node in enumerate(nodes, 1)}}
        return replace(
            self,
            tokens=tuple(self.tokens[node - 1] for node in nodes),
            parents=tuple(index[self.parents[node - 1]] for node in nodes),
            kinds=None if self.kinds is None else tuple(self.kinds[node - 1] for node in nodes),
        )

    def first_chain(self) -> Draft:
        """The chain of the first child of each node: the best one, for siblings are in order. Of drawn
        siblings the first is a draw from q, so the chain is verified as one that was drawn alone."""
        nodes, children = list[int](), self.children(0)
        while children:
            nodes.append(children[0])
            children = self.children(children[0])
        if len(nodes) == len(self):
            return self
        q = None if self.q is None else [self.q[node - 1] for node in nodes]
        kinds = None if self.kinds is None else tuple(self.kinds[node - 1] for node in nodes)
        return replace(Draft.chain(self.path_tokens(nodes), q), kinds=kinds)

    def cut(self, count: int) -> Draft | None:
        """The first ``count`` drafts; None for 0."""
        if count >= len(self):
            return self
        if count <= 0:
            return None
        q = None if self.q is None else self.q[:count]
        kinds = None if self.kinds is None else self.kinds[:count]
        return Draft(self.tokens[:count], self.parents[:count], q, self.rule, kinds)

    def check(self) -> None:
        """Raises AssertionError naming what is inconsistent."""
        n = len(self)
        assert n >= 1, "a draft of no tokens"
        assert len(self.parents) == n, f"{len(self.parents)} parents for {n} drafts"
        assert self.kinds is None or len(self.kinds) == n, f"{len(self.kinds or ())} kinds for {n} drafts"
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True), 1):
            assert token >= 0, f"draft {node} is token {token}"
            assert 0 <= parent < node, f"draft {node} follows {parent}"
        if self.rule == "fixed":
            assert self.q is None, "fixed drafts were not drawn from any q"
            return
        assert self.rule in ("iid", "distinct"), f"unknown rule {self.rule!r}"
        assert self.q is not None and len(self.q) == n, f"the rule {self.rule} needs q of {n} rows"
        for node in range(n + 1):
            self._check_siblings(node, self.q)

    def _check_siblings(self, node: int, q: Floats | Sequence[Floats]) -> None:
        siblings = self._children[node]
        for child in siblings:
            row, token = q[child - 1], self.tokens[child - 1]
            assert token < len(row) and row[token] > 0, f"draft {child}: q of its token {token} is 0"
            assert abs(float(row.sum()) - 1) < 1e-3, f"draft {child}: q sums to {row.sum()}"
            first = q[siblings[0] - 1]
            assert row is first or np.array_equal(row, first), f"drafts after {node} have several q"
        tokens = self.path_tokens(siblings)
        equal = self.rule == "distinct" and len(set(tokens)) < len(tokens)
        assert not equal, f"drafts after {node} are drawn without replacement, and equal: {tokens}"

    @cached_property
    def _children(self) -> tuple[tuple[int, ...], ...]:
        children: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents, 1):
            children[parent].append(node)
        return tuple(map(tuple, children))


@dataclass(frozen=True)
class Verdict:
    """The result of verification.

    Args:
        path: indices of the accepted drafts, in order; may be empty.
        token: the target's token after them.
    """

    path: tuple[int, ...]
    token: int

    @property
    def rows(self) -> tuple[int, ...]:
        """The row of logits that decided each new token, for its log-probability."""
        return (0, *self.path)

    def tokens(self, draft: Draft) -> tuple[int, ...]:
        """The new tokens: the accepted drafts and the token after them."""
        return (*draft.path_tokens(self.path), self.token)


def kind_of(group: int, level: int) -> int:
    """The kind of a level; levels from LEVELS - 1 on share one."""
    return group * LEVELS + min(level, LEVELS - 1)


def kinds_of(draft: Draft) -> Sequence[int]:
    """The kind of each draft of a tree: its own, or its depth."""
    return draft.kinds or [kind_of(0, depth) for depth in draft.depths[1:]]


class DraftBuilder:
    """Builds a tree of fixed drafts from continuations; common beginnings share their nodes.

    Args:
        ends: end tokens; a continuation stops after one.
        most: drafts at most; further ones are not added.
    """

    def __init__(self, ends: frozenset[int] = frozenset(), most: int = 1 << 30) -> None:
        self.ends, self.most = ends, most
        self.kinds: list[int] = []
        self.roots = 0  # different first tokens
        self._nodes: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, token: int) -> bool:
        """Whether a continuation begins with the token."""
        return (0, token) in self._nodes

    def add(self, tokens: Sequence[int], kinds: Sequence[int], parent: int = 0) -> list[int]:
        """Add a continuation of a node; the nodes of its tokens, as many as ``most`` allows."""
        nodes: list[int] = []
        for token, kind in zip(tokens, kinds, strict=True):
            node = self._nodes.get((parent, token))
            if node is None:
                if len(self) >= self.most:
                    break
                node = self._nodes[parent, token] = len(self) + 1
                self.roots += not parent
                self.kinds.append(kind)
            nodes.append(node)
            parent = node
            if token in self.ends:
                break
        return nodes

    def draft(self) -> Draft | None:
        """The draft; None if it is empty."""
        if not self._nodes:
            return None
        tokens = tuple(token for _, token in self._nodes)
        return Draft(tokens, tuple(parent for parent, _ in self._nodes), kinds=tuple(self.kinds))
