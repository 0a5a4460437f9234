"""How long a drafter takes from a commit to its next offer: network, queue and drafting together.

    mean, spread     exponential moving averages of the measured seconds and of their distance from the mean
    expected         mean + 2 spread: most offers arrive by then

The estimate is TCP's (RFC 6298), with a narrower margin: here a late answer costs a plain pass, no message.
A single answer counts as OUTLIER times the expected seconds at most: the drafter may have been stopped.
"""

from __future__ import annotations

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
