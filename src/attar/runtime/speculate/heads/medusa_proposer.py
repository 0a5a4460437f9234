"""Medusa's heads as a proposer: the likeliest tokens of each head, in the ranks of a static tree.

Head k reads the state behind the last token that was run, whose own next token is decided, and predicts the
k-th token after that one. Heads do not see each other's tokens, so drafts are fixed, and the same ranks in
every pass (``models/draft_heads/static_tree.py``). The policy says how deep a tree pays, and which nodes.

A draft is counted by its depth and its rank: group 0 is the chain of likeliest tokens.

Letters: n drafts of a tree, K heads, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from attar.models.draft_heads.medusa_module import MedusaHeads
from attar.models.draft_heads.static_tree import Paths, to_depth
from attar.models.draft_heads.vocabulary import tokens_of
from attar.runtime.speculate.draft import Draft, kind_of
from attar.runtime.speculate.heads.context import ContextReader
from attar.runtime.speculate.heads.times import measure_rounds
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest, DraftTimes


class MedusaProposer:
    """A ``TimedProposer`` (see ``proposer.py``).

    Args:
        context: of the target's final states.
        ends: nothing is drafted after one.
    """

    is_free_of_compute, samples_from_q, needs_full_tree, confident = False, False, False, False
    name, branches = "medusa", 1

    def __init__(self, heads: MedusaHeads, context: ContextReader, *, ends: Sequence[int] = ()) -> None:
        self.heads, self.context, self.ends = heads, context, frozenset(ends)
        chain = tuple((0,) * depth for depth in range(1, heads.config.drafts + 1))
        self.tree = heads.config.tree or chain
        # a searched tree may have no path for the last heads, a given one levels for which there is no head
        self.deepest = min(max(map(len, self.tree)), heads.config.drafts)
        self.trees, self.most, self.tokens = self.tree != chain, len(self.tree), tokens_of(heads)
        self._shape = cache(lambda depth: TreeShape.of(to_depth(self.tree, depth)))

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """A tree for each request, at most ``depth`` deep."""
        drafting = [index for index, request in enumerate(requests) if request.most > 0 and request.depth > 0]
        drafts: list[Draft | None] = [None] * len(requests)
        if not drafting:
            return drafts
        deepest = max(min(requests[index].depth, self.deepest) for index in drafting)
        h = torch.stack([self.context.last(requests[index])[-1] for index in drafting])
        ranked = [self._ranked(h, k) for k in range(deepest)]
        for row, index in enumerate(drafting):
            request = requests[index]
            shape = self._shape(min(request.depth, deepest))
            draft = shape.draft([tokens[row] for tokens in ranked], self.ends)
            drafts[index] = draft and draft.cut(request.most)
        return drafts

    def times(self) -> DraftTimes:
        """Of rounds without an end."""
        return measure_rounds(MedusaProposer(self.heads, self.context), self.context, self.deepest)

    def observe(self, feedback: Sequence[DraftFeedback]) -> None:
        """Nothing: the states are read with the next request."""

    def forget(self, sequence: int) -> None:
        """A sequence ended."""
        self.context.forget(sequence)

    def _ranked(self, h: torch.Tensor, k: int) -> list[list[int]]:
        """Of states (B, H): the likeliest tokens of head k, as many as the tree has ranks, best first."""
        ranks = max(path[k] for path in self.tree if len(path) > k) + 1
        logits = self.heads.logits(h, k)
        tokens = logits.topk(min(ranks, logits.shape[-1]), -1).indices
        chosen: list[list[int]] = (tokens if self.tokens is None else self.tokens[tokens]).tolist()
        return chosen


class TreeShape:
    """The nodes of a static tree, in its order: parents first, best first.

    Attributes:
        head_ranks: head and rank of each draft.
        parents, kinds: as a :class:`Draft` has them.
    """

    def __init__(
        self, head_ranks: tuple[tuple[int, int], ...], parents: tuple[int, ...], kinds: tuple[int, ...]
    ) -> None:
        self.head_ranks, self.parents, self.kinds = head_ranks, parents, kinds

    @classmethod
    def of(cls, tree: Paths) -> TreeShape:
        """From its paths."""
        index = {(): 0} | {path: node for node, path in enumerate(tree, 1)}
        head_ranks = tuple((len(path) - 1, path[-1]) for path in tree)
        kinds = tuple(kind_of(path[-1], len(path)) for path in tree)
        return cls(head_ranks, tuple(index[path[:-1]] for path in tree), kinds)

    def draft(self, ranked: Sequence[Sequence[int]], ends: frozenset[int]) -> Draft | None:
        """The draft of the likeliest tokens of each head; nothing follows an end, and a rank that a small
        vocabulary lacks is left out."""
        complete = all(rank < len(ranked[k]) for k, rank in self.head_ranks)
        if complete:
            tokens = tuple(ranked[k][rank] for k, rank in self.head_ranks)
            if ends.isdisjoint(tokens):
                return Draft(tokens, self.parents, kinds=self.kinds) if tokens else None
        kept, drafted = {0: 0}, list[tuple[int, int, int]]()
        for node, ((k, rank), parent, kind) in enumerate(
            zip(self.head_ranks, self.parents, self.kinds, strict=True), 1
        ):
            if parent not in kept or rank >= len(ranked[k]):
                continue
            if parent and drafted[kept[parent] - 1][0] in ends:
                continue
            drafted.append((ranked[k][rank], kept[parent], kind))
            kept[node] = len(drafted)
        if not drafted:
            return None
        columns = tuple(zip(*drafted, strict=True))
        return Draft(columns[0], columns[1], kinds=columns[2])
