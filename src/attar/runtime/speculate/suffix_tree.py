"""A counted suffix tree of token sequences, and the drafts that it holds.

    node      a string of at most D tokens that occurs in the texts; count: how often
    match     the m < D last tokens of a context, where they occurred before and something followed
    p         of a token after a string: count(string, token) / sum over tokens; of a draft: the product on
              its path from the match
    draft     for each m a tree of at most ``factor`` m tokens, the likeliest first, none below ``least``
    score     the sum of its p: accepted tokens, if the counts were the probabilities

The draft of the highest score is taken, of equal ones that of the longest match; one from the tree of other
requests only where its match is longer than any in the sequence itself. Of equally likely tokens the one that
occurred last is the first.

Past the end of its sequence a draft goes on from its own beginning: what was copied once is copied again.

A token adds one occurrence to each string that ends with it: O(D). Removing a text takes its occurrences
away.

Kinds (``draft.py``), by which acceptance is counted: the group is the tree, and how a token's count compares
with those of its siblings (one occurrence in all, several of one token, the majority, the minority); the
level is the length of the context in tokens, drafts included.

Source: SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975); D and least as in vLLM. SAM-Decoding (Hu et al.
2024, arXiv 2411.10666) has the same in suffix automata. Differs: p is a share of the occurrences that go on;
latest first; other requests only with a longer match; factor 4, not 1, for measured acceptance by kind
decides what is run (1.74 against 1.57 tokens a pass on Python code, ``benchmarks/speculate.py --parts
suffix``).

Letters: D depth, m tokens of a match. The compiled tree (``csrc/suffix_tree.cpp``) has fewer nodes: none
below a string that occurs once.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Protocol

from attar.kernels.suffix_tree import CompiledSuffixTree, available
from attar.runtime.speculate.draft import kind_of

DEPTH, FACTOR, LEAST = 24, 4.0, 0.1
GROUP, GROUPS = 64, 4  # the first group of kinds, and groups of a tree
BOUNDS = (2, 3, 4, 5, 7, 10, 15)  # least lengths of a context of levels 2, 3, ...

Nodes = tuple[list[int], list[int], list[int]]
"""Tokens, parents and kinds of a draft."""


class SuffixTree(Protocol):
    """Texts, extended at their ends, and drafts after one of them."""

    def __len__(self) -> int:
        """Nodes."""
        ...

    def begin(self) -> int:
        """A new text; its number."""
        ...

    def extend(self, text: int, tokens: Sequence[int]) -> None:
        """Append tokens to a text."""
        ...

    def count(self, string: Sequence[int]) -> int:
        """How often a string of at most ``depth`` tokens occurs."""
        ...

    def remove(self, text: int) -> None:
        """Remove a text with all its occurrences; it must not be extended again."""
        ...

    def draft(self, text: int, tokens: Sequence[int], others: Any, most: int) -> Nodes:
        """Append tokens to a text, and draft after them.

        Args:
            others: a tree of the same class, of other requests; None: none.
            most: drafts at most.
        """
        ...


def suffix_tree(
    ends: Sequence[int] = (), *, depth: int = DEPTH, factor: float = FACTOR, least: float = LEAST
) -> SuffixTree:
    """An empty tree, compiled where possible.

    Args:
        ends: end tokens: nothing is drafted after one.
    """
    tree = CompiledSuffixTree if available() else PythonSuffixTree
    return tree(depth, factor, least, ends)


def kind(count: int, total: int, length: int, group: int) -> int:
    """The kind of a token after a context.

    Args:
        count, total: its occurrences, and all that follow the context.
        length: of the context.
        group: 0: the sequence's own tree, 1: other requests'.
    """
    share = 0 if total == 1 else 1 if count == total else 2 if 2 * count >= total else 3
    return kind_of(GROUP + group * GROUPS + share, 1 + bisect_right(BOUNDS, length))


class _Node:
    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.count = 0
        self.children: dict[int, _Node] = {}  # by token, the latest last


class PythonSuffixTree:
    """A ``SuffixTree`` without a compiler."""

    def __init__(self, depth: int, factor: float, least: float, ends: Sequence[int]) -> None:
        self._depth, self._factor, self._least, self._ends = depth, factor, least, frozenset(ends)
        self._root, self._size, self._next = _Node(), 0, 0
        self._texts: dict[int, list[int]] = {}
        self._active: dict[int, list[_Node]] = {}  # by text: the strings that end at its end, longest first

    def __len__(self) -> int:
        return self._size

    def begin(self) -> int:
        self._texts[self._next], self._active[self._next] = [], []
        self._next += 1
        return self._next - 1

    def extend(self, text: int, tokens: Sequence[int]) -> None:
        self._texts[text] += tokens
        for token in tokens:
            active = [*self._active[text], self._root][-self._depth :]
            self._active[text] = [self._child(node, token) for node in active]

    def count(self, string: Sequence[int]) -> int:
        node = self._node(string)
        return 0 if node is None else node.count

    def remove(self, text: int) -> None:
        tokens = self._texts.pop(text)
        del self._active[text]
        for start in range(len(tokens)):
            node = self._root
            for token in tokens[start : start + self._depth]:
                child = node.children[token]
                child.count -= 1
                if not child.count:
                    del node.children[token]
                    self._size -= 1
                node = child

    def draft(self, text: int, tokens: Sequence[int], others: PythonSuffixTree | None, most: int) -> Nodes:
        self.extend(text, tokens)
        context = self._texts[text][1 - self._depth :]
        best, score, longest = self._best(context, most, 0, ([], [], []), 0.0, 0)
        return best if others is None else others._best(context, most, 1, best, score, longest)[0]

    def _child(self, node: _Node, token: int) -> _Node:
        """A child with one more occurrence, as the latest."""
        child = node.children.pop(token, None)
        if child is None:
            child = _Node()
            self._size += 1
        child.count += 1
        node.children[token] = child
        return child

    def _best(
        self, context: Sequence[int], most: int, group: int, best: Nodes, score: float, shorter: int
    ) -> tuple[Nodes, float, int]:
        """The draft of the highest score, if that is above ``score``; its score; tokens of the longest match.

        Args:
            shorter: tokens that a match is longer than.
        """
        longest = 0
        for length in range(len(context), shorter, -1):
            node = self._node(context[-length:])
            if node is not None and node.children:
                longest = longest or length
                nodes, grown = self._grow(node, length, min(most, int(self._factor * length)), group)
                if grown > score:
                    best, score = nodes, grown
        return best, score, longest

    def _node(self, string: Sequence[int]) -> _Node | None:
        node: _Node | None = self._root
        for token in string:
            node = None if node is None else node.children.get(token)
        return node

    def _grow(self, match: _Node, length: int, limit: int, group: int) -> tuple[Nodes, float]:
        """At most ``limit`` drafts after a match, the likeliest first, and the sum of their probabilities."""
        tokens, parents, kinds, paths, score = list[int](), list[int](), list[int](), [list[int]()], 0.0
        heap: list[tuple[float, int, int, int, int, _Node | int]] = []
        order = 0

        def push(node: _Node | int, p: float, parent: int) -> None:
            """``node``: or, past the end of the sequence, an index in the path."""
            nonlocal order
            path = paths[parent]
            if isinstance(node, int) or not (node.children or group):
                index = node if isinstance(node, int) else 0
                children: list[tuple[int, int, _Node | int]] = [
                    (token, 1, index + 1) for token in path[index:][:1]
                ]
            else:
                children = [(token, child.count, child) for token, child in reversed(node.children.items())]
            total = sum(count for _, count, _ in children)
            for token, count, child in children:
                below = p * (count / total)
                if below >= self._least:
                    label = kind(count, total, length + len(path), group)
                    heapq.heappush(heap, (-below, order, parent, token, label, child))
                    order += 1

        push(match, 1.0, 0)
        while heap and len(tokens) < limit:
            p, _, parent, token, label, node = heapq.heappop(heap)
            tokens.append(token)
            parents.append(parent)
            kinds.append(label)
            paths.append([*paths[parent], token])
            score -= p
            if token not in self._ends and length + len(paths[-1]) < self._depth:
                push(node, -p, len(tokens))
        return (tokens, parents, kinds), score
