"""A chooser that does not choose: always so many drafts, to see what they cost and bring."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attar.runtime.speculate.choose import Chooser
from attar.runtime.speculate.cost import Cost
from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.proposer import News
from attar.runtime.speculate.purse import Purse


class Fixed(Chooser):
    """K drafts wherever there is room; of a tree the first K, of a tree that is learnt from all or none.

    Args:
        most: K.
        cost: is told of every pass, and so knows what each size takes.
    """

    def __init__(self, most: int, cost: Cost | None = None) -> None:
        super().__init__(cost or Cost(), most, Purse(spare=math.inf))

    @property
    def open(self) -> bool:
        return True

    def rest(self, batch: int, asking: float) -> int:
        return 0

    def choose(self, sequences: Sequence[int], most: Sequence[int], beside: int = 0) -> list[int]:
        return [min(limit, self.most) for limit in most]

    def prune(
        self, sequences: Sequence[int], drafts: Sequence[Draft | None], beside: int = 0
    ) -> list[Draft | None]:
        return [draft and draft.cut(self.most) for draft in drafts]

    def whole(
        self, sequences: Sequence[int], drafts: Sequence[Draft | None], beside: int = 0
    ) -> list[Draft | None]:
        return list(drafts)

    def note(self, news: Sequence[News], target: float, draft: float = 0.0, beside: int = 0) -> None:
        if news and not beside:
            drafts = sum(len(each.draft) for each in news if each.draft is not None)
            self.cost.note_target(len(news), len(news) + drafts, target)

    def forget(self, sequence: int) -> None:
        pass
