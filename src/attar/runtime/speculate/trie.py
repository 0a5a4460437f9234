"""A tree of fixed drafts while it grows: every continuation of a node is held once."""

from __future__ import annotations

from collections.abc import Sequence

from attar.runtime.speculate.draft import Draft


class DraftBuilder:
    """Continuations, what they begin with in common held once.

    Args:
        ends: a continuation stops with one of these.
        most: drafts at most; more are not added.
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
        """Adds a continuation of a node; the nodes of its tokens, as many as there was room for."""
        found: list[int] = []
        for token, kind in zip(tokens, kinds, strict=True):
            node = self._nodes.get((parent, token))
            if node is None:
                if len(self) >= self.most:
                    break
                node = self._nodes[parent, token] = len(self) + 1
                self.roots += not parent
                self.kinds.append(kind)
            found.append(node)
            parent = node
            if token in self.ends:
                break
        return found

    def draft(self) -> Draft | None:
        """What there is as a draft; None where that is nothing."""
        if not self._nodes:
            return None
        tokens = tuple(token for _, token in self._nodes)
        return Draft(tokens, tuple(parent for parent, _ in self._nodes), kinds=tuple(self.kinds))
