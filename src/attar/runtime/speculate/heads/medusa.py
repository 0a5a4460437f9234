"""Medusa's heads as a proposer: the likeliest token of each head, one after the other.

Head k reads the state behind the last token that was run, whose own next token is decided, and predicts the
k-th token after that one. Heads do not see each other's tokens, so drafts are fixed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attar.models.draft_heads.medusa import MedusaHeads
from attar.models.draft_heads.vocabulary import tokens_of
from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.heads.context import ContextReader
from attar.runtime.speculate.heads.times import measure_rounds
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest, DraftTimes


class MedusaProposer:
    """A ``Proposer`` (see ``proposer.py``).

    Args:
        context: of the target's final states.
        ends: nothing is drafted after one.
    """

    free, draws, learns_tree, confident, trees = False, False, False, False, False
    name, branches = "medusa", 1

    def __init__(self, heads: MedusaHeads, context: ContextReader, *, ends: Sequence[int] = ()) -> None:
        self.heads, self.context, self.ends = heads, context, frozenset(ends)
        self.most = heads.config.drafts
        self.tokens = tokens_of(heads)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """A chain for each request."""
        asked = [index for index, request in enumerate(requests) if request.most > 0]
        drafts: list[Draft | None] = [None] * len(requests)
        if not asked:
            return drafts
        h = torch.stack([self.context.last(requests[index])[-1] for index in asked])
        count = self.heads.config.drafts
        chains = torch.stack([self.heads.logits(h, k).argmax(-1) for k in range(count)], 1)
        if self.tokens is not None:
            chains = self.tokens[chains]
        for index, chain in zip(asked, chains.tolist(), strict=True):
            stop = next((i + 1 for i, token in enumerate(chain) if token in self.ends), len(chain))
            drafts[index] = Draft.chain(chain[: min(stop, requests[index].most)])
        return drafts

    def times(self) -> DraftTimes:
        """Of rounds without an end."""
        return measure_rounds(MedusaProposer(self.heads, self.context), self.context, self.most)

    def observe(self, feedback: Sequence[DraftFeedback]) -> None:
        """Nothing: the states are read with the next request."""

    def forget(self, sequence: int) -> None:
        """A sequence ended."""
        self.context.forget(sequence)
