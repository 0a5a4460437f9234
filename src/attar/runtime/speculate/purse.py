"""How much time speculation may still lose.

Time is counted in plain passes. A pass of a batch of B that took s and brought e tokens, where a plain one
takes t, has lost

    loss = s / t - e / B

and the purse, which begins with SPARE, becomes min(purse + RATE e / B - loss, SPARE). A pass may only
speculate where the most it can lose (every draft rejected) is in the purse. So over any stretch of passes
that brings T tokens a sequence

    all loss <= SPARE + RATE T    (times as the cost model says; what it is wrong by is lost once a pass)

500 tokens: 5 + 0.015 * 500 = 12.5 passes, 2.5 %; and in the long run 1.5 %, whatever the text. Gains fill the
purse, never above SPARE, so that a good hour does not pay for a bad one.
"""

from __future__ import annotations

SPARE = 5.0  # plain passes
RATE = 0.015


class Purse:
    """The time that may be lost.

    Args:
        spare: most of it, plain passes.
        rate: share of the plain time that may be lost in the long run.
    """

    def __init__(self, spare: float = SPARE, rate: float = RATE) -> None:
        self.spare, self.rate = spare, rate
        self.left = spare

    def affords(self, loss: float) -> bool:
        """Whether so much may be lost at once, plain passes."""
        return loss <= self.left

    def note(self, cost: float, tokens: float) -> None:
        """A pass cost so much, in plain passes, and brought so many tokens a sequence."""
        self.left = min(self.left + self.rate * tokens + tokens - cost, self.spare)
