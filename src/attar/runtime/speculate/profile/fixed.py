"""A policy that does not choose: always so many drafts, to see what they cost and bring."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attar.runtime.speculate.draft import Draft, kind_of
from attar.runtime.speculate.latency import Latency
from attar.runtime.speculate.policy import DraftPolicy, LossBudget
from attar.runtime.speculate.proposer import DraftFeedback


class FixedPolicy(DraftPolicy):
    """K drafts wherever there is room; of a tree the first K, of a tree that is learnt from all or none.

    Args:
        most: K.
        latency: learns what each size takes.
    """

    def __init__(self, most: int, latency: Latency | None = None) -> None:
        super().__init__(latency or Latency(), most, LossBudget(math.inf))

    @property
    def open(self) -> bool:
        return True

    def rest(self, batch: int, asking: float) -> int:
        return 0

    def choose(
        self,
        sequences: Sequence[int],
        limits: Sequence[int],
        prompt_tokens: int = 0,
        branches: int = 1,
        room: int | None = None,
    ) -> list[set[int]]:
        return [{kind_of(0, depth) for depth in range(1, min(limit, self.most) + 1)} for limit in limits]

    def select(
        self,
        sequences: Sequence[int],
        drafts: Sequence[Draft | None],
        prompt_tokens: int = 0,
        whole: bool = False,
    ) -> list[Draft | None]:
        return [draft if whole else draft and draft.cut(self.most) for draft in drafts]

    def note(
        self, news: Sequence[DraftFeedback], seconds: float, drafting: float = 0.0, prompt_tokens: int = 0
    ) -> None:
        if news and not prompt_tokens:
            drafts = sum(len(each.draft) for each in news if each.draft is not None)
            self.latency.note_target(len(news), len(news) + drafts, seconds)

    def forget(self, sequence: int) -> None:
        pass
