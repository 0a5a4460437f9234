"""Drafters as the engine sees them: one replica, or what a coordinator has chosen; and how long one takes
from a commit to its next offer, network, queue and drafting together.

    mean, spread     exponential moving averages of the measured seconds and of their distance from the mean
    expected         mean + 2 spread: most offers arrive by then

The estimate is TCP's (RFC 6298), with a narrower margin: here a late answer costs a plain pass, no message.
A single answer counts as OUTLIER times the expected seconds at most: the drafter may have been stopped.
"""

from __future__ import annotations

from typing import Protocol

from attar.serving.services.messages import Open, ServiceMessage

MEAN, SPREAD, MARGIN, OUTLIER = 1 / 8, 1 / 4, 2.0, 4.0


class Turnaround:
    """Measured seconds; None before the first."""

    def __init__(self) -> None:
        self.mean: float | None = None
        self.spread = 0.0

    @property
    def expected(self) -> float | None:
        """Seconds in which most answers arrive."""
        return None if self.mean is None else self.mean + MARGIN * self.spread

    def note(self, seconds: float) -> None:
        """Learn from an answer."""
        if self.mean is None:
            self.mean, self.spread = seconds, seconds / 2
            return
        seconds = min(seconds, OUTLIER * (self.mean + MARGIN * self.spread))
        self.spread += SPREAD * (abs(seconds - self.mean) - self.spread)
        self.mean += MEAN * (seconds - self.mean)


class Drafter(Protocol):
    """One drafter as the engine sees it; called from the engine's thread, never blocks.

    Attributes:
        name: for metrics.
        ready: whether it answers; once it does not, its requests are opened elsewhere.
        turnaround: measured by the proposer.
    """

    name: str
    turnaround: Turnaround

    @property
    def ready(self) -> bool: ...

    def send(self, message: ServiceMessage) -> None:
        """Send soon, in order."""
        ...

    def record_verdict(self, drafted: int, accepted: int) -> None:
        """Count the drafted tokens that a pass verified and accepted."""
        ...


class DrafterPool(Protocol):
    """The drafters of an engine."""

    def ready_for(self, request: str) -> bool:
        """Whether one may be ready for a request, by the client's id of it: asked in every pass, so cheap."""
        ...

    def choose(self, opening: Open) -> Drafter | None:
        """The drafter for a request; None where none is ready."""
        ...
