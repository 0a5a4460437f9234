"""A head that drafts a chain, a token after the other, each drawn as the target's tokens are.

    propose    the states of newly decided tokens are read; then the head gives logits for the next token of
    every
               draft, until all drafts are closed
    x_i        as in ``draft_model.py``: the likeliest token, or drawn by the request's rules with its q

A head sees decided tokens, their states, and its own drafts. Whether a draft goes on is decided before its
next token is drawn: a head with ``confidence`` ends it where it does not pay (``DraftRequest.min_chance``).
Its confidences are corrected by what was accepted (``confidence_correction.py``).

Letters: R drafts, m layers, H hidden size, V vocabulary of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.draft_model import GrowingDraft
from attar.runtime.speculate.heads.confidence_correction import ConfidenceCorrection
from attar.runtime.speculate.heads.context import ContextReader
from attar.runtime.speculate.heads.times import measure_rounds
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest, DraftTimes


class ChainHead(Protocol):
    """The part of a proposer that belongs to one kind of head."""

    @property
    def drafts(self) -> int:
        """Most tokens of a chain."""
        ...

    def read(self, sequence: int, tokens: Sequence[int], start: int, states: Tensor) -> None:
        """States float32 (count, m, H) of decided positions from ``start`` on; earlier ones were read before.

        Args:
            tokens: of the sequence, all so far.
        """
        ...

    def begin(self, drafts: Sequence[GrowingDraft]) -> None:
        """A round of drafts begins; the head may complete or close some of them itself."""
        ...

    def logits(self, drafts: Sequence[GrowingDraft]) -> Tensor:
        """float32 (R, V) of the next token of each draft, after its ``tokens`` so far; -inf: cannot be
        drafted. Only drafts of this round, fewer from call to call."""
        ...

    def forget(self, sequence: int) -> None:
        """A sequence ended; unknown ids are ignored."""
        ...


class ConfidentHead(ChainHead, Protocol):
    """A head that knows how likely its tokens are accepted."""

    def confidence(self, drafts: Sequence[GrowingDraft]) -> Sequence[float]:
        """The chance that the next token of each draft is accepted if those before it are, from all that is
        known before it is drawn; called before ``logits``."""
        ...


class ChainProposer:
    """A ``Proposer`` (see ``proposer.py``) of a chain head.

    Args:
        context: of the layers that the head reads.
        ends: nothing is drafted after one.
        branches: tokens of a row of logits at most: one of the chain, and its siblings.
        min_confidence: a draft ends after a row whose likeliest token has a lower probability; 0: never.
    """

    is_free_of_compute, samples_from_q, needs_full_tree, trees = False, True, False, False

    def __init__(
        self,
        head: ChainHead,
        context: ContextReader,
        *,
        name: str,
        ends: Sequence[int] = (),
        branches: int = 1,
        min_confidence: float = 0.0,
    ) -> None:
        self.head, self.context, self.name = head, context, name
        self.ends, self.branches, self.min_confidence = frozenset(ends), branches, min_confidence
        self.most, self.confident = head.drafts, hasattr(head, "confidence")
        self.correction = ConfidenceCorrection()
        self._drafted: dict[int, GrowingDraft] = {}  # the last of each sequence, of a confident head

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """A chain of at most ``most`` drafts for each request, with siblings where it asks for them."""
        drafts: list[GrowingDraft | None] = []
        for request in requests:
            drafts.append(self._begin(request) if request.most > 0 else None)
        growing = [draft for draft in drafts if draft is not None]
        if growing:
            self.head.begin(growing)
        growing = [draft for draft in growing if draft.open]
        while growing:
            if self.confident:
                chances = cast(ConfidentHead, self.head).confidence(growing)
                pairs = zip(growing, chances, strict=True)
                growing = [draft for draft, chance in pairs if not draft.ends_before(float(chance))]
                if not growing:
                    break
            for row, draft in zip(self.head.logits(growing), growing, strict=True):
                draft.extend(row[None])
            growing = [draft for draft in growing if draft.open]
        if self.confident:
            self._drafted = {draft.request.sequence: draft for draft in drafts if draft is not None}
        return [None if draft is None else draft.draft() for draft in drafts]

    def observe(self, feedback: Sequence[DraftFeedback]) -> None:
        """Learn how right the chances were: the next request has the tokens, and their states are in the
        pool."""
        for verified in feedback if self._drafted else ():
            draft = self._drafted.pop(verified.sequence, None)
            if draft is not None:
                self.correction.note(verified.sequence, draft.tokens, draft.chances, verified.tokens)

    def forget(self, sequence: int) -> None:
        """A sequence ended."""
        self._drafted.pop(sequence, None)
        self.correction.forget(sequence)
        self.context.forget(sequence)
        self.head.forget(sequence)

    def times(self) -> DraftTimes:
        """Of rounds on states that are not there yet, with no end."""
        endless = ChainProposer(self.head, self.context, name=self.name, branches=self.branches)
        endless.confident = False
        return measure_rounds(endless, self.context, self.head.drafts)

    def read(self, request: DraftRequest) -> None:
        """Read what is new of a sequence."""
        start, states = self.context.unread(request)
        if len(states):
            self.head.read(request.sequence, request.tokens, start, states)

    def _begin(self, request: DraftRequest) -> GrowingDraft:
        self.read(request)
        most = min(request.most, self.head.drafts)
        branches = self.branches if request.siblings else 1
        ids = list(request.tokens)
        draft = GrowingDraft(request, ids, len(ids), most, self.ends, self.min_confidence, branches)
        if self.confident and request.min_chance > 0:
            draft.factors = self.correction.factors(request.sequence, most)
        return draft
