"""How long a pass takes: seconds measured at so many tokens, kept up to date by every real step.

    t(batch, tokens)    the target, for all tokens of a pass (one certain token a sequence, drafts, prompts)
    draft(batch)        one step of the draft model; 0 where drafts are free

What an engine does around a pass is not in what was measured without one: the first plain passes of a real
text say how much it is, and that is added to every size. It is the lower quartile, for passes right behind a
prompt take up to three times as long. Nothing should be drafted before (``settled``).

A curve has knots (tokens, seconds), straight lines between them, the last slope beyond, and never falls. A
step that took s where the curve says e changes it by the ratio r = s / e, taken between 2/3 and 3/2 so that a
hiccup of the machine is no lesson:

    every knot *= r^level            (another process came, the contexts have grown)
    the two knots around *= r^(shape w),  w the weight of each in the straight line
    (level, shape) is PLAIN where the step had no drafts, and DRAFTED where it had: that is first of all news
    of such steps

so that a machine that became slow while only one size is run is not taken for a curve that became flat. A
size far from every knot becomes a knot. Batches have a curve each; between two of them the time is
interpolated at the same number of tokens, outside the nearest curve serves: a token costs what a token
costs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

PLAIN, DRAFTED = (0.10, 0.05), (0.025, 0.12)  # level and shape
LEAST, MOST = 2 / 3, 3 / 2  # of r
APART = 1.6  # a size this far from every knot becomes one


class Curve:
    """Seconds by size, never falling.

    Args:
        points: {size: seconds}; may be empty.
    """

    def __init__(self, points: Mapping[int, float] | None = None) -> None:
        self._knots = sorted(points or {})
        self._raw = [float((points or {})[size]) for size in self._knots]
        self._values: list[float] = []
        self._settle()

    def __bool__(self) -> bool:
        return bool(self._knots)

    def at(self, size: int) -> float:
        """Seconds of a size; 0 where nothing is known."""
        knots, values = self._knots, self._values
        if not knots:
            return 0.0
        right = bisect_left(knots, size)
        if right == 0 or len(knots) == 1:
            return values[0] if size <= knots[0] else values[0] * size / knots[0]
        right = min(right, len(knots) - 1)
        share = (size - knots[right - 1]) / (knots[right] - knots[right - 1])
        return values[right - 1] + share * (values[right] - values[right - 1])

    def over(self, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
        """``at`` of many sizes (S,): seconds (S,)."""
        knots, values = self._knots, self._values
        if len(knots) < 2:
            return np.array([self.at(int(size)) for size in sizes])
        slope = (values[-1] - values[-2]) / (knots[-1] - knots[-2])
        found: NDArray[np.float64] = np.interp(sizes, knots, values) + slope * np.maximum(
            sizes - knots[-1], 0
        )
        return found

    def note(self, size: int, seconds: float, shape: float) -> float:
        """Learns from a step; r, the step's share of what was expected, 1 where the size was new."""
        if self._is_new(size):
            place = bisect_left(self._knots, size)
            self._knots.insert(place, size)
            self._raw.insert(place, seconds)
            self._settle()
            return 1.0
        expected = self.at(size)
        ratio = min(max(seconds / expected, LEAST), MOST) if expected > 0 else 1.0
        for place, weight in self._around(size):
            self._raw[place] *= ratio ** (shape * weight)
        self._settle()
        return ratio

    def scale(self, factor: float) -> None:
        """All seconds times a factor."""
        self._raw = [seconds * factor for seconds in self._raw]
        self._settle()

    def shift(self, seconds: float) -> None:
        """All seconds so many more; none falls below half."""
        self._raw = [max(each + seconds, each / 2) for each in self._raw]
        self._settle()

    def table(self) -> dict[int, float]:
        """The knots as they are."""
        return dict(zip(self._knots, self._values, strict=True))

    def _is_new(self, size: int) -> bool:
        return all(max(size, knot) > APART * min(size, knot) for knot in self._knots)

    def _around(self, size: int) -> list[tuple[int, float]]:
        """The knots beside a size, with their weights."""
        right = bisect_left(self._knots, size)
        if right in (0, len(self._knots)):
            return [(min(right, len(self._knots) - 1), 1.0)]
        low, high = self._knots[right - 1], self._knots[right]
        share = (size - low) / (high - low)
        return [(right - 1, 1 - share), (right, share)]

    def _settle(self) -> None:
        self._values, top = [], 0.0
        for seconds in self._raw:
            top = max(top, seconds)
            self._values.append(top)


class Cost:
    """The times of target and draft.

    Args:
        target: {batch: {tokens of the pass: seconds}}, measured; what is missing is learnt from steps.
        draft: {batch: seconds of one step of the draft}; empty: drafts are free until steps say otherwise.
        settle: plain passes that say what is to be added to ``target``.
        reading: seconds that the draft model takes to read a token of a text that it meets.
    """

    def __init__(
        self,
        target: Mapping[int, Mapping[int, float]] | None = None,
        draft: Mapping[int, float] | None = None,
        settle: int = 0,
        reading: float = 0.0,
    ) -> None:
        self._target = {batch: Curve(points) for batch, points in sorted((target or {}).items()) if points}
        self._draft, self.reading = Curve(draft), reading
        self._settle, self._added = settle if self._target else 0, list[float]()

    @property
    def settled(self) -> bool:
        """Whether enough plain passes were seen."""
        return len(self._added) >= self._settle

    @property
    def known(self) -> bool:
        """Whether there is any time of the target to judge by."""
        return bool(self._target)

    @property
    def guesses(self) -> bool:
        """Whether of every batch one size is all that was measured: the others are taken in proportion."""
        return all(len(curve.table()) < 2 for curve in self._target.values())

    def target(self, batch: int, tokens: int) -> float:
        """Seconds of a pass over ``tokens`` tokens, of ``batch`` sequences."""
        return sum(share * curve.at(tokens) for share, curve in self._curves(batch))

    def targets(self, batch: int, tokens: int, count: int) -> list[float]:
        """Seconds of passes over ``tokens``, ``tokens`` + 1, ... tokens, ``count`` of them."""
        sizes = np.arange(tokens, tokens + count)
        found = np.zeros(count)
        for share, curve in self._curves(batch):
            found += share * curve.over(sizes)
        times: list[float] = found.tolist()
        return times

    def plain(self, batch: int, beside: int = 0) -> float:
        """Seconds of a pass without drafts, ``beside`` tokens of prompts in it."""
        return self.target(batch, batch + beside)

    def passes(self, batch: int, tokens: int, seconds: float, beside: int = 0) -> float:
        """What a pass that took so long cost in plain ones; a hiccup of the machine is no draft's fault.
        Beside prompts, whose noise is larger, the curves say it.
        """
        plain, expected = self.plain(batch), self.target(batch, tokens)
        if not beside:
            return min(seconds, MOST * expected) / plain
        return 1 + (expected - self.plain(batch, beside)) / plain

    def draft(self, batch: int) -> float:
        """Seconds of one step of the draft for ``batch`` sequences."""
        return self._draft.at(batch) if batch else 0.0

    def note_target(self, batch: int, tokens: int, seconds: float) -> None:
        """A pass took so long."""
        if not self.settled:
            self._note_first(batch, tokens, seconds)
            return
        plain, batch = tokens == batch, _rounded(batch)
        curve = self._target.get(batch)
        if curve is None:
            curve = Curve(self._nearest(batch))
            self._target = dict(sorted([*self._target.items(), (batch, curve)]))
        level, shape = PLAIN if plain else DRAFTED
        ratio = curve.note(tokens, seconds, shape)
        for each in self._target.values():
            each.scale(ratio**level)

    def _note_first(self, batch: int, tokens: int, seconds: float) -> None:
        """One of the first plain passes; with the last of them all curves are shifted."""
        if tokens == batch:
            self._added.append(seconds - self.plain(batch))
        if self.settled:
            for each in self._target.values():
                each.shift(sorted(self._added)[len(self._added) // 4])

    def note_draft(self, batch: int, steps: int, seconds: float) -> None:
        """``steps`` steps of the draft took so long together."""
        if steps > 0:
            level, shape = PLAIN
            self._draft.scale(self._draft.note(batch, seconds / steps, shape) ** level)

    def table(self) -> dict[int, dict[int, float]]:
        """{batch: {tokens: seconds}} as it is known now."""
        return {batch: curve.table() for batch, curve in self._target.items()}

    def _curves(self, batch: int) -> list[tuple[float, Curve]]:
        """The curves that a batch is reckoned from, with their shares."""
        sizes = list(self._target)
        if not sizes:
            return [(1.0, Curve())]
        right = bisect_left(sizes, batch)
        if right == len(sizes) or sizes[right] == batch or right == 0:
            return [(1.0, self._target[sizes[min(right, len(sizes) - 1)]])]
        low, high = sizes[right - 1], sizes[right]
        share = (batch - low) / (high - low)
        return [(1 - share, self._target[low]), (share, self._target[high])]

    def _nearest(self, batch: int) -> Mapping[int, float]:
        sizes = sorted(self._target, key=lambda size: abs(size - batch))
        return self._target[sizes[0]].table() if sizes else {}


def _rounded(batch: int) -> int:
    """The next power of two: batches that share a curve."""
    return 1 << (batch - 1).bit_length()
