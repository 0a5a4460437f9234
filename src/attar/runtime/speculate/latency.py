"""Time of a pass: seconds measured before serving, corrected by every pass.

    t(B, n) = curve(n) + offset(B, n)        n tokens of a pass, B sequences

The curve interpolates linearly between the measured sizes and extrapolates with the last slope. The offset is
the engine's overhead and other errors of the measurement: a mean of seconds - curve(n) over the first passes,
then an exponential moving average (weight WEIGHT), one for each power of two of B and each quarter of an
octave of n, with the nearest known offset as first value. Of the first ``settle`` plain passes the shortest
counts: passes right after a prefill take up to three times as long.

The curve is measured on one private sequence (or eight) in the first blocks of the pool, which no request
uses yet. Every size is run once to warm up and then timed, with greedy sampling of its rows; the shortest
time counts. Long passes are timed once; sizes beyond the time limit are not measured.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.warp import SamplingRow, adjust, likeliest
from attar.runtime.step import Runner, StepInput, TokenSpan

WEIGHT = 0.1
OUTLIER = 1.5  # times the expected seconds: longer passes are clipped
SIZES = {1: (1, 2, 4, 8, 16, 32), 8: (8, 16, 32, 64)}  # n by B
PRIVATE = -1  # and below: sequence ids that no scheduler uses
SECONDS = 1.0  # of the measurement, about
ROUNDS = 3
GREEDY = SamplingRow(SamplingParams(temperature=0.0))


class Latency:
    """Seconds of the target's passes and of the draft model's steps.

    Args:
        target: {tokens: seconds} of a pass, measured; empty: learnt from the passes.
        draft: {sequences: seconds} of a step of the draft model; empty: 0.
        settle: plain passes before anything is drafted.
        reading: seconds a prompt token of the draft model's prefill, or of a head's reading.
        window: most tokens that it reads at once.
        begin: {sequences: seconds} of a round of drafts in addition to its steps; empty: 0.
    """

    def __init__(
        self,
        target: Mapping[int, float] | None = None,
        draft: Mapping[int, float] | None = None,
        settle: int = 0,
        reading: float = 0.0,
        begin: Mapping[int, float] | None = None,
        window: float = math.inf,
    ) -> None:
        self._target, self._draft, self._begin = (_Curve(points or {}) for points in (target, draft, begin))
        self._settle, self._reading, self._window = settle, reading, window
        self.settled = settle <= 0  # whether enough plain passes were seen

    @property
    def known(self) -> bool:
        """Whether any time of the target is known."""
        return self._target.known

    def target(self, batch: int, tokens: int, prompt_tokens: int = 0) -> float:
        """Seconds of a pass over ``tokens`` tokens of ``batch`` sequences; 0 where nothing is known.

        ``prompt_tokens``: further tokens of the pass, of prompts; their time is not included.
        """
        target = self._target
        seconds = target.seconds(batch, tokens, tokens + prompt_tokens)
        if prompt_tokens:
            seconds += target.measured(batch) - target.measured(batch + prompt_tokens)
        return seconds if tokens == batch else max(seconds, target.seconds(batch, batch, batch))

    def draft(self, width: int, first: bool = False) -> float:
        """Seconds of a step of the draft model for ``width`` sequences; the ``first`` begins the round."""
        step = self._draft.seconds(width, width, width) if width else 0.0
        return step + self.beginning(width) if first else step

    def beginning(self, width: int) -> float:
        """Seconds of a round of drafts for ``width`` sequences in addition to its steps."""
        return self._begin.seconds(width, width, width) if width else 0.0

    def read(self, tokens: int) -> float:
        """Seconds of the first round's prefill, of a sequence with this number of new tokens."""
        return min(tokens, self._window) * self._reading

    def note_target(self, batch: int, tokens: int, seconds: float) -> None:
        """Learn from a pass without prompts."""
        plain = tokens == batch
        if plain and not self.settled:
            self._settle -= 1
            self.settled = self._settle <= 0
            self._target.note(batch, tokens, seconds, shortest=True)
        elif self.settled:
            self._target.note(batch, tokens, seconds)

    def note_draft(self, width: int, seconds: float, steps: int = 1) -> None:
        """Learn from a round of drafts: what its steps are not expected to take is that of its beginning,
        where it has one."""
        if self._begin.known:
            self._begin.note(width, width, max(seconds - steps * self.draft(width), 0.0))
        else:
            self._draft.note(width, width, seconds / steps)


class _Curve:
    """Measured seconds by size, and learnt offsets."""

    def __init__(self, points: Mapping[int, float]) -> None:
        self._sizes = sorted(points)
        self._seconds = list(accumulate((points[size] for size in self._sizes), max))
        self._offsets: dict[tuple[int, int], float] = {}
        self._counts: dict[tuple[int, int], int] = {}  # passes that an offset was learnt from
        self._measured: dict[int, float] = {}  # computed once for each size
        self._nearest: dict[tuple[int, int], tuple[int, int]] = {}  # keys with an offset, by batch and size
        self._expected: dict[tuple[int, int, int], float] = {}  # since the last offset was learnt

    @property
    def known(self) -> bool:
        return bool(self._sizes or self._offsets)

    def seconds(self, batch: int, size: int, total: int) -> float:
        """Of ``total`` tokens with the offset of ``size``; at least half of the measured time; 0 where
        nothing is known."""
        seconds = self._expected.get((batch, size, total))
        if seconds is None:
            seconds = self.measured(total)
            if self._offsets:
                seconds = max(seconds + self._offset(batch, size), seconds / 2)
            self._expected[batch, size, total] = seconds
        return seconds

    def measured(self, size: int) -> float:
        """Seconds of a size on the curve."""
        seconds = self._measured.get(size)
        if seconds is None:
            seconds = self._measured[size] = self._interpolated(size)
        return seconds

    def note(self, batch: int, size: int, seconds: float, shortest: bool = False) -> None:
        """Update an offset; ``shortest``: to the shortest pass so far."""
        key, measured = _key(batch, size), self.measured(size)
        offset, count = self._offsets.get(key), self._counts.get(key, 0)
        if offset is None:
            offset = self._offset(batch, size) if self._sizes and self._offsets else seconds - measured
            self._nearest.clear()
        if shortest:
            offset = min(offset, seconds - measured)
        else:
            expected = measured + offset
            offset += max(WEIGHT, 1 / (2 + count)) * (min(seconds, OUTLIER * expected) - expected)
            self._counts[key] = count + 1
        self._offsets[key] = offset
        self._expected.clear()

    def _offset(self, batch: int, size: int) -> float:
        """The offset of the nearest key that was run."""
        nearest = self._nearest.get((batch, size))
        if nearest is None:
            power, part = _key(batch, size)
            nearest = min(self._offsets, key=lambda key: (abs(key[0] - power), abs(key[1] - part)))
            self._nearest[batch, size] = nearest
        return self._offsets[nearest]

    def _interpolated(self, size: int) -> float:
        if len(self._sizes) < 2:
            return self._seconds[0] if self._sizes else 0.0
        right = min(max(bisect_left(self._sizes, size), 1), len(self._sizes) - 1)
        low, high = self._sizes[right - 1 : right + 1]
        before, after = self._seconds[right - 1 : right + 1]
        return before + (after - before) * max(size - low, 0) / (high - low)


@lru_cache(maxsize=1 << 12)
def _key(batch: int, size: int) -> tuple[int, int]:
    """Power of two of the batch, quarter of an octave of the size."""
    return (batch - 1).bit_length(), round(4 * math.log2(size))


def measure(
    runner: Runner,
    sizes: dict[int, tuple[int, ...]] | None = None,
    *,
    budget: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, dict[int, float]]:
    """{B: {n: seconds}}, without sizes beyond the pool's capacity or the time limit.

    Args:
        runner: with an empty pool.
        budget: seconds after which no further size is begun.
    """
    times: dict[int, dict[int, float]] = {}
    began = clock()
    for batch, counts in (sizes or SIZES).items():
        for count in counts:
            step = _step(runner, batch, count)
            if step is None or (times and clock() - began > budget):
                break
            times.setdefault(batch, {})[count] = _best(runner, step, budget / 8, clock)
    for row in range(max(times, default=0)):
        runner.forget(PRIVATE - row)
    return {batch: _rising(points) for batch, points in times.items()}


def by_tokens(times: dict[int, dict[int, float]]) -> dict[int, float]:
    """{n: seconds}; for a size measured with several B, that of the smallest B."""
    return {
        count: seconds for batch in sorted(times, reverse=True) for count, seconds in times[batch].items()
    }


def _rising(points: dict[int, float]) -> dict[int, float]:
    """Each time at most that of a larger size."""
    seconds = list(accumulate(reversed(points.values()), min))
    return dict(zip(points, reversed(seconds), strict=True))


def _best(runner: Runner, step: StepInput, enough: float, clock: Callable[[], float]) -> float:
    """The shortest of ROUNDS runs after one to warm up, or the first that takes ``enough`` seconds."""
    best = None
    for turn in range(1 + ROUNDS):
        fresh = replace(step)  # its cached properties are computed again
        began = clock()
        likeliest(adjust(runner.run(fresh), [GREEDY] * fresh.count))
        took = clock() - began
        if turn or took > enough:
            best = took if best is None else min(best, took)
        if took > enough:
            break
    assert best is not None
    return best


def _step(runner: Runner, batch: int, count: int) -> StepInput | None:
    """``count`` tokens spread over ``batch`` sequences; None beyond the pool's capacity or the context."""
    length = count // batch
    blocks = -(-length // runner.block_size)
    if batch * blocks > runner.capacity or (runner.context is not None and length > runner.context):
        return None
    spans = [
        TokenSpan(PRIVATE - row, 0, length, tuple(range(row * blocks, (row + 1) * blocks)), length)
        for row in range(batch)
    ]
    return StepInput([0] * (batch * length), tuple(spans))
