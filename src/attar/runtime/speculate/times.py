"""How long passes of a runner take, measured before it serves: what the chooser begins with.

A private sequence (or eight) on blocks from the pool's beginning, which nobody has yet. Every size is run
once to warm up and then measured, with the greedy draw of its rows; the smallest of the times counts. Long
passes are measured once, and when the time is up the other sizes are left to be learnt. Nothing stays: what
the passes wrote is never read.

Letters: B sequences, T tokens of a pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.warp import SamplingRow, adjust, likeliest
from attar.runtime.step import Runner, StepInput, TokenSpan

SIZES = {1: (1, 2, 4, 8, 16, 32), 8: (8, 16, 32, 64)}  # T by B
PROBE = -1  # and below: sequences that no scheduler has
BUDGET = 1.0  # seconds, about
ROUNDS = 3
GREEDY = SamplingRow(SamplingParams(temperature=0.0))

Times = dict[int, dict[int, float]]


def measure(
    runner: Runner,
    sizes: dict[int, tuple[int, ...]] | None = None,
    *,
    budget: float = BUDGET,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """{B: {T: seconds}}; sizes that the pool has no room for, or the time does not allow, are missing.

    Args:
        runner: whose pool holds nothing yet.
        budget: seconds after which no further size is begun.
    """
    found: Times = {}
    began = clock()
    for batch, counts in (sizes or SIZES).items():
        for count in counts:
            step = _step(runner, batch, count)
            if step is None or (found and clock() - began > budget):
                break
            found.setdefault(batch, {})[count] = _best(runner, step, budget / 8, clock)
    for place in range(max(found, default=0)):
        runner.forget(PROBE - place)
    return {batch: _rising(points) for batch, points in found.items()}


def _rising(points: dict[int, float]) -> dict[int, float]:
    """Each no longer than any after it."""
    seconds = np.minimum.accumulate(list(points.values())[::-1])[::-1]
    return dict(zip(points, seconds.tolist(), strict=True))


def _best(runner: Runner, step: StepInput, enough: float, clock: Callable[[], float]) -> float:
    """The shortest of some runs; the first warms up, and is the only one where it took long enough."""
    best = None
    for turn in range(1 + ROUNDS):
        fresh = replace(step)  # what is derived of it is reckoned again
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
    """``count`` tokens, as evenly as they go over ``batch`` sequences; None where there is no room."""
    each = count // batch
    blocks = -(-each // runner.block_size)
    if batch * blocks > runner.capacity or (runner.context is not None and each > runner.context):
        return None
    spans = [
        TokenSpan(PROBE - place, 0, each, tuple(range(place * blocks, (place + 1) * blocks)), each)
        for place in range(batch)
    ]
    return StepInput([0] * (batch * each), tuple(spans))
