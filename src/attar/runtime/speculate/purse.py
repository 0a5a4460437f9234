"""How much time speculation may still lose.

Time is counted in plain passes. A pass of a batch of B that took s and brought e tokens, where a plain one
takes t, has lost

    loss = s / t - e / B

and the purse, which begins with SPARE, becomes min(purse + RATE e / B - loss, SPARE). A pass may only
speculate where the most it can lose (every draft rejected) is in the purse. So over any stretch of passes
that brings T tokens a sequence

    all loss <= SPARE + RATE T    (times as the cost model says; what it is wrong by is lost once a pass, and
                                   what the machine lost while it stood still is not counted)

An empty purse is closed until it is nearly full again, and meanwhile speculation rests: to ask what could be
drafted takes time too, and where that is more than RATE of a pass, a purse that opened with the first penny
would never hold a second. For the same reason an answer without any draft is followed by a pause, so long
that asking takes RATE of the time, but not so long that a text that begins to repeat itself is missed.

500 tokens: 5 + 0.015 * 500 = 12.5 passes, 2.5 %; and in the long run 1.5 %, whatever the text. Gains fill the
purse, never above SPARE, so that a good hour does not pay for a bad one.
"""

from __future__ import annotations

import math

SPARE = 5.0  # plain passes
FULL_ENOUGH = 0.8  # of it, to begin again after it was empty
RATE = 0.015
PAUSE = 12  # passes at most in which nothing is asked because the last answer was empty


class Purse:
    """The time that may be lost.

    Args:
        spare: most of it, plain passes.
        rate: share of the plain time that may be lost in the long run.
    """

    def __init__(self, spare: float = SPARE, rate: float = RATE) -> None:
        self.spare, self.rate = spare, rate
        self.left, self.open = spare, True

    def affords(self, loss: float) -> bool:
        """Whether so much may be lost at once, plain passes."""
        return self.open and loss <= self.left

    @property
    def rest(self) -> int:
        """Plain passes until a closed purse opens; 0 where it is open."""
        return 0 if self.open else math.ceil((FULL_ENOUGH * self.spare - self.left) / self.rate)

    def pause(self, asking: float) -> int:
        """Passes in which not to ask, after asking took so much of a plain pass and brought no draft."""
        return min(int(asking / self.rate), PAUSE)

    def rested(self, passes: int) -> None:
        """So many plain passes are over."""
        self.note(passes, passes)

    def note(self, cost: float, tokens: float) -> None:
        """A pass cost so much, in plain passes, and brought so many tokens a sequence."""
        self.left = min(self.left + self.rate * tokens + tokens - cost, self.spare)
        if self.left <= 0:
            self.open = False
        elif self.left >= FULL_ENOUGH * self.spare:
            self.open = True
