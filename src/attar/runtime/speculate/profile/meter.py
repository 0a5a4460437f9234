"""A proposer that is watched: its passes are counted, and its time is taken.

It stands between a speculator and the proposer proper, and changes nothing that either sees.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.profile.passes import AcceptanceCounts
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest, Proposer


class MeteredProposer:
    """Counts.

    Args:
        proposer: who is watched.

    Attributes:
        passes: of all sequences, from their second token on: the first is the prompt's.
        seconds: of proposing and observing.
    """

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        self.passes, self.seconds = AcceptanceCounts(), 0.0
        self._begun: dict[int, None] = {}

    @property
    def name(self) -> str:
        return self.proposer.name

    @property
    def free(self) -> bool:
        return self.proposer.free

    @property
    def draws(self) -> bool:
        return self.proposer.draws

    @property
    def looks(self) -> bool:
        return self.proposer.looks

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Draft | None]:
        began = time.perf_counter()
        found = self.proposer.propose(wishes)
        self._spent(began)
        return found

    def observe(self, news: Sequence[DraftFeedback]) -> None:
        began = time.perf_counter()
        self.proposer.observe(news)
        self._spent(began)
        for each in news:
            if each.sequence in self._begun:
                draft = each.draft
                depth = 0 if draft is None else len(draft.counts)
                self.passes.note(0 if draft is None else len(draft), depth, len(each.path))
            self._begun[each.sequence] = None

    def fork(self, sequence: int, child: int) -> None:
        self.proposer.fork(sequence, child)

    def forget(self, sequence: int) -> None:
        self._begun.pop(sequence, None)
        self.proposer.forget(sequence)

    def _spent(self, began: float) -> None:
        self.seconds += time.perf_counter() - began
