"""The dynamic draft tree: Li et al. 2024, "EAGLE-2: Faster Inference of Language Models with Dynamic Draft
Trees", arXiv 2406.16858, section 4.

    v(node) = log q of its path                      the confidence that it is accepted
    expand    of each level the k nodes with the highest v; each has its k likeliest tokens as children
    rerank    of all nodes the N with the highest v; among equals those that were made earlier

v of a child is never above its parent's, and a parent is made first: the N nodes are a tree. They are ordered
by v, so that the first of them are a tree too.

Letters: k branches, V vocabulary, q distribution of the draft.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from attar.runtime.speculate.draft import LEVELS, Draft, kind_of


class GrowingTree:
    """A tree under construction. Nodes are numbered as they are made, 0 is the last decided token.

    Args:
        branches: k.
        ends: nothing is drafted after one.

    Attributes:
        tokens, parents: of nodes 0..n; those of node 0 are -1.
        scores: v, 0 of node 0.
        leaves: nodes that are expanded next, best first.
    """

    def __init__(self, branches: int, ends: frozenset[int]) -> None:
        self.branches, self.ends = branches, ends
        self.tokens, self.parents, self.scores = [-1], [-1], [0.0]
        self.leaves = [0]

    def path(self, node: int) -> list[int]:
        """The nodes from depth 1 down to a node; empty for 0."""
        nodes = []
        while node:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """The tokens of a path."""
        return [self.tokens[ancestor] for ancestor in self.path(node)]

    def grow(self, log_q: Tensor) -> None:
        """Add the likeliest tokens after each leaf.

        Args:
            log_q: (leaves, V) natural logarithms; a row with NaN, or without any token, has no children.
        """
        top = log_q.topk(min(self.branches, log_q.shape[-1]))
        first = len(self.tokens)
        for leaf, tokens, values in zip(self.leaves, top.indices.tolist(), top.values.tolist(), strict=True):
            for token, value in zip(tokens, values, strict=True):
                if value > -math.inf:
                    self.tokens.append(token)
                    self.parents.append(leaf)
                    self.scores.append(self.scores[leaf] + min(value, 0.0))
        level = [node for node in range(first, len(self.tokens)) if self.tokens[node] not in self.ends]
        self.leaves = sorted(level, key=lambda node: (-self.scores[node], node))[: self.branches]

    def draft(self, most: int) -> Draft | None:
        """The best nodes, at most ``most``, best first; None where there are none."""
        nodes = rerank(self.scores, most)
        if not nodes:
            return None
        index = {0: 0, **{node: new for new, node in enumerate(nodes, 1)}}
        return Draft(
            tuple(self.tokens[node] for node in nodes),
            tuple(index[self.parents[node]] for node in nodes),
            kinds=self._kinds(nodes),
        )

    def _kinds(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """Group 0: the likeliest token after each of a chain from the root, by depth. Group 1: others, by how
        likely they are after their parents, in halves."""
        kinds, chain = [], [0]
        for node in nodes:
            parent = self.parents[node]
            if parent == chain[-1]:  # the best child comes first
                chain.append(node)
                kinds.append(kind_of(0, len(chain) - 1))
            else:
                halves = (self.scores[parent] - self.scores[node]) / math.log(2)
                kinds.append(kind_of(1, 1 + int(min(halves, LEVELS))))
        return tuple(kinds)


def rerank(scores: Sequence[float], most: int) -> list[int]:
    """The nodes 1..n with the highest scores, at most ``most``, best first; among equals earlier ones."""
    return sorted(range(1, len(scores)), key=lambda node: (-scores[node], node))[: max(most, 0)]
