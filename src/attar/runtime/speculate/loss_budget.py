"""A bound on what speculation may lose against plain decoding.

left = min(left + (1 + LOSS) tokens - cost, size)       after each pass, in plain passes
size = BUDGET, or BEGINNINGS of a round of drafts, LARGEST at most

Rounds that are dear before their first draft need the larger size: rates are learnt from some ten rounds, and
with less the budget is empty before.
"""

from __future__ import annotations

import math

BUDGET, LOSS = 5.0, 0.015  # plain passes; share of the plain time
BEGINNINGS, LARGEST = 15, 15.0  # of a round; plain passes
REOPENS = 0.2  # share of the size: reopened at the first gain, it could not pay for a draft


class LossBudget:
    """Plain passes that may be lost, ``size`` at most; an empty budget is closed until it can pay again."""

    def __init__(self, size: float = BUDGET) -> None:
        self.size, self.left, self.open = size, size, True

    @property
    def max_loss_per_pass(self) -> float:
        """Half of what is left: drafts get shorter as the budget does, and seldom empty it."""
        return self.left / 2

    @property
    def closed_passes(self) -> int:
        """Plain passes until a closed budget opens."""
        return 0 if self.open else math.ceil((REOPENS * self.size - self.left) / LOSS)

    def ensure_capacity(self, round_cost: float) -> None:
        """Hold as much as rounds need that cost ``round_cost`` plain passes before their first draft."""
        more = min(BEGINNINGS * round_cost, LARGEST) - self.size
        if more > 0:
            self.size, self.left = self.size + more, self.left + more

    def note(self, cost: float, tokens: float) -> None:
        """Count passes that cost as much as ``cost`` plain ones, with ``tokens`` new tokens a sequence."""
        self.left = min(self.left + (1 + LOSS) * tokens - cost, self.size)
        self.open = self.left > 0 and (self.open or self.left >= REOPENS * self.size)
