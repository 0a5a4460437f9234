"""From values to pixels: linear and logarithmic axes with round ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

LOG_STEPS = ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,))


@dataclass(frozen=True)
class Axis:
    """Values ``low`` to ``high`` on pixels ``start`` to ``end`` (start above end turns it round)."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        low, high, value = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, most: int = 7) -> list[float]:
        """At most ``most`` round values inside the axis."""
        wide = self.log and self.high / self.low > 4  # on less, a logarithmic axis is nearly linear
        choices = _log_ticks(self.low, self.high) if wide else _linear_ticks(self.low, self.high)
        return next((ticks for ticks in choices if len(ticks) <= most), [])


def fit(
    values: Iterable[float], start: float, end: float, *, log: bool = False, margin: float = 0.08
) -> Axis:
    """An axis around the values with a margin on both sides, as a fraction of its length.

    A single value, or equal ones, sit in the middle. A logarithmic axis takes positive values only.
    """
    known = list(values) or [1.0]
    low, high = (math.log(x) if log else x for x in (min(known), max(known)))
    if math.isclose(low, high, abs_tol=1e-12):
        half = math.log(2) if log else abs(high) / 2 or 1.0
        low, high = low - half, high + half
    space = (high - low) * margin / (1 - 2 * margin)
    low, high = low - space, high + space
    return Axis(*((math.exp(low), math.exp(high)) if log else (low, high)), start, end, log)


def from_zero(values: Iterable[float], start: float, end: float, margin: float = 0.08) -> Axis:
    """A linear axis from zero to a little above the largest value."""
    high = max((value for value in values), default=0.0) or 1.0
    return Axis(0.0, high * (1 + margin), start, end)


def _log_ticks(low: float, high: float) -> list[list[float]]:
    """Ticks at 1-1.5-2-3-4-5-7, at 1-2-3-5, at 1-2-5, at powers of ten, at every other power ... the densest
    first.
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    sets = [[m * 10.0**e for e in range(first, last + 1) for m in steps] for steps in LOG_STEPS]
    sets += [
        [10.0**e for e in range(first, last + 1) if e % stride == 0] for stride in range(2, last - first + 2)
    ]
    return [_inside(ticks, low, high) for ticks in sets]


def _linear_ticks(low: float, high: float) -> list[list[float]]:
    step = 10.0 ** math.floor(math.log10(high - low)) / 10
    steps = [step * factor for factor in (1, 2, 2.5, 5, 10, 20, 25, 50, 100)]
    return [
        [each * n for n in range(math.ceil(low / each), math.floor(high / each + 1e-9) + 1)] for each in steps
    ]


def _inside(ticks: list[float], low: float, high: float) -> list[float]:
    return [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
