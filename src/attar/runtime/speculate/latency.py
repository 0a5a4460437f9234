"""How long a pass takes: seconds measured before serving, corrected by every pass.

    t(B, n) = curve(n) + offset(B, n)        n tokens of a pass, B sequences

The curve holds the measured sizes, with straight lines between them and the last slope beyond. The offset is
what an engine does around a pass and what else the measurement missed: an exponential moving average (weight
WEIGHT) of seconds - curve(n), one for each power of two of B and each quarter of an octave of n. A size that
was never run has the offset of the nearest that was. Of the first SETTLE plain passes the shortest counts:
those right behind a prompt take up to three times as long.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

WEIGHT = 0.1
OUTLIER = 1.5  # times the expected seconds: what is beyond is not learnt
LARGEST = 64  # keys of sizes: 2^16 tokens


class Latency:
    """Seconds of the target's passes and of the draft model's steps.

    Args:
        target: {tokens: seconds} of a pass, measured; empty: learnt from passes alone.
        draft: {sequences: seconds} of a step of the draft model; empty: no time at all.
        settle: plain passes before anything is drafted.
        reading: seconds of the draft model for a token of a prompt.
    """

    def __init__(
        self,
        target: Mapping[int, float] | None = None,
        draft: Mapping[int, float] | None = None,
        settle: int = 0,
        reading: float = 0.0,
    ) -> None:
        self._target, self._draft = _Curve(target or {}), _Curve(draft or {})
        self._settle, self.reading = settle, reading

    @property
    def settled(self) -> bool:
        """Whether enough plain passes were seen."""
        return self._settle <= 0

    @property
    def known(self) -> bool:
        """Whether there is any time of the target."""
        return self._target.known

    def target(self, batch: int, tokens: int) -> float:
        """Seconds of a pass over ``tokens`` tokens of ``batch`` sequences; 0 where nothing is known."""
        return self.targets(batch, tokens, 1)[0]

    def targets(self, batch: int, tokens: int, count: int) -> list[float]:
        """Seconds of passes over ``tokens``, ``tokens`` + 1, ... tokens, ``count`` of them, never falling."""
        return self._target.over(batch, np.arange(tokens, tokens + count))

    def draft(self, width: int) -> float:
        """Seconds of a step of the draft model for ``width`` sequences."""
        return self._draft.over(1, np.array([width]))[0] if width and self._draft.known else 0.0

    def extra(self, batch: int, tokens: int, seconds: float, prompt_tokens: int = 0) -> float:
        """Seconds that the drafts of a pass took: as measured, but for outliers; with prompts as expected."""
        expected = self.target(batch, tokens)
        if prompt_tokens:
            return expected - self.target(batch, batch + prompt_tokens)
        if self._target.knows(batch, tokens):
            seconds = min(seconds, OUTLIER * expected)
        return seconds - self.target(batch, batch)

    def note_target(self, batch: int, tokens: int, seconds: float) -> None:
        """A pass took so long."""
        if self._settle > 0 and tokens == batch:
            self._settle -= 1
            self._target.note(batch, tokens, seconds, lowest=True)
        elif self._settle <= 0:
            self._target.note(batch, tokens, seconds)

    def note_draft(self, width: int, seconds: float) -> None:
        """A step of the draft model took so long."""
        self._draft.note(1, width, seconds)


class _Curve:
    """Measured seconds by size, and offsets learnt."""

    def __init__(self, points: Mapping[int, float]) -> None:
        self._sizes = np.array(sorted(points) or [1], float)
        self._seconds = np.maximum.accumulate([points[size] for size in sorted(points)] or [0.0])
        self._offsets: dict[tuple[int, int], float] = {}
        self._tables: dict[int, NDArray[np.float64]] = {}  # offsets by size's key, of a batch's key

    @property
    def known(self) -> bool:
        return bool(self._seconds[-1] > 0 or self._offsets)

    def over(self, batch: int, sizes: NDArray[np.int64]) -> list[float]:
        """Seconds of sizes (S,) that rise."""
        seconds = self._measured(sizes) + self._table(_key(batch))[_keys(sizes)]
        return np.maximum.accumulate(np.maximum(seconds, 0.0)).tolist()  # type: ignore[no-any-return]

    def knows(self, batch: int, size: int) -> bool:
        """Whether a size was run, or lies between measured ones."""
        return len(self._sizes) > 1 or (_key(batch), int(_keys(np.array([size]))[0])) in self._offsets

    def note(self, batch: int, size: int, seconds: float, lowest: bool = False) -> None:
        """A pass of a size took so long; ``lowest``: the shortest so far counts."""
        at = np.array([size])
        key, error = (_key(batch), int(_keys(at)[0])), seconds - float(self._measured(at)[0])
        before = self._offsets.get(key, error)
        if lowest:
            self._offsets[key] = min(before, error)
        else:
            expected = self.over(batch, at)[0] if key in self._offsets else seconds
            self._offsets[key] = before + WEIGHT * (min(seconds, OUTLIER * expected) - expected)
        self._tables.clear()

    def _measured(self, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
        knots, seconds = self._sizes, self._seconds
        measured: NDArray[np.float64] = np.interp(sizes, knots, seconds)
        if len(knots) > 1:
            slope = (seconds[-1] - seconds[-2]) / (knots[-1] - knots[-2])
            measured += slope * np.maximum(sizes - knots[-1], 0)
        return measured

    def _table(self, batch: int) -> NDArray[np.float64]:
        """The offset of each size's key: that of the nearest key that was run."""
        if batch not in self._tables:
            keys = sorted(self._offsets)
            row = [
                self._offsets[min(keys, key=lambda key: (abs(key[0] - batch), abs(key[1] - size)))]
                for size in range(LARGEST if keys else 0)
            ]
            self._tables[batch] = np.array(row or [0.0] * LARGEST)
        return self._tables[batch]


def _key(batch: int) -> int:
    """Powers of two."""
    return (batch - 1).bit_length()


def _keys(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Quarters of an octave."""
    keys: NDArray[np.int64] = np.minimum(np.rint(4 * np.log2(sizes)), LARGEST - 1).astype(np.int64)
    return keys
