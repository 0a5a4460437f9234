"""How much time speculation may still lose, in plain passes.

    left = min(left + (1 + RATE) tokens - cost, SIZE)      after a pass: its cost, tokens a sequence

Drafts are run only where all of them rejected would cost no more than ``left``. So over any stretch of passes
with T tokens a sequence the loss is at most SIZE + RATE T: 2.5 % of 500 tokens, 1.5 % in the long run. An
empty budget is closed until it is nearly full again: one that opened with the first gain could not pay for a
draft, and asking a proposer takes time too.
"""

from __future__ import annotations

import math

SIZE = 5.0
RATE = 0.015
REOPENS = 0.8  # share of SIZE
PAUSE = 12  # passes without asking, at most, after an answer without drafts


class LossBudget:
    """What may be lost.

    Args:
        size: most that it holds, plain passes.
        rate: share of the plain time that may be lost in the long run.
    """

    def __init__(self, size: float = SIZE, rate: float = RATE) -> None:
        self.size, self.rate = size, rate
        self.left, self.open = size, True

    @property
    def rest(self) -> int:
        """Plain passes until a closed budget opens; 0 where it is open."""
        return 0 if self.open else math.ceil((REOPENS * self.size - self.left) / self.rate)

    def pause(self, asking: float) -> int:
        """Passes without asking, after asking took so many plain passes and brought no draft."""
        return min(int(asking / self.rate), PAUSE)

    def note(self, cost: float, tokens: float) -> None:
        """Passes cost so many plain ones, and brought so many tokens a sequence."""
        self.left = min(self.left + (1 + self.rate) * tokens - cost, self.size)
        if self.left <= 0:
            self.open = False
        elif self.left >= REOPENS * self.size:
            self.open = True
