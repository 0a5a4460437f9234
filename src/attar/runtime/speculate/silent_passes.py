"""Passes for which a free proposer has nothing to draft: looked up, and no more.

    a proposal in vain → UNMEASURED look-ups, each after its pause → a proposal with its plan and feedback

A look-up asks the proposer about the sequences that it follows (``silent``): no request is made, no pass is
measured, nothing is learnt. It takes about a third of the time of a proposal in vain, so text that turns
repetitive is noticed earlier. The first sequence that is new or has drafts ends them: the proposal of that
pass finds what was looked up.

    pause      passes after a look-up, in which its seconds are at most ASKING of the plain time
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attar.runtime.scheduler import Planned
from attar.runtime.speculate.policy import PAUSE, DraftPolicy
from attar.runtime.speculate.speculative_pass import decodes_one

UNMEASURED = 15
HasNoDraft = Callable[[int, Sequence[int], int], bool]
"""Whether a proposer has no drafts for a sequence, its tokens, so many drafts at most."""


class SilentPasses:
    """The passes since a proposal in vain.

    Attributes:
        active: whether there are any; else every pass is planned.
    """

    def __init__(self) -> None:
        self.active = False
        self._batch = self._left = self._rest = self._passes = self._asked = 0
        self._unit = self._seconds = 0.0

    def begin(self, policy: DraftPolicy, batch: int, pause: int) -> None:
        """After a proposal in vain, which ``pause`` passes pay for."""
        self._unit = policy.asking * policy.latency.target(batch, batch)
        self.active, self._left, self._rest = self._unit > 0, UNMEASURED, pause
        self._batch, self._passes, self._asked, self._seconds = batch, 0, 0, 0.0

    def rests(self) -> bool:
        """Whether the next pass is one of a pause."""
        if not self._rest:
            return False
        self._rest -= 1
        self._passes += 1
        return True

    def look(self, planned: Planned, running: int, silent: HasNoDraft, most: int) -> bool:
        """Whether no sequence of a pass has drafts; False as well if one is new, or it is time to measure.

        Args:
            running: sequences that the proposer follows.
            most: drafts of a sequence at most.
        """
        if not self._left or len(planned) != running:
            return False
        return all(decodes_one(one) and silent(one.id, one.tokens, most) for one, _ in planned)

    def note(self, seconds: float) -> None:
        """A look in vain took so long."""
        self._passes += 1
        self._left -= 1
        self._asked += 1
        self._seconds += seconds
        self._rest = min(int(seconds / self._unit), PAUSE)

    def end(self, policy: DraftPolicy) -> None:
        """Every pass is planned again; these were plain ones."""
        self.active = False
        policy.budget.note(self._passes, self._passes)
        policy.charge_asking(self._batch, self._seconds, self._asked)
