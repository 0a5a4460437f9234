"""Seconds of a head's rounds, measured on an empty pool: what one costs to begin, and each level of it.

    t(K) = begin + K step,   from rounds of one level and of all        the shortest of ROUNDS after a warm-up
    reading                  of a sequence's first round, a token

The rounds are real ones: private sequences in the first blocks of the pool, which no request uses yet, each
two tokens longer than the one before. Only greedy drafts are measured; every later round corrects them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.heads.context import ContextReader
from attar.runtime.speculate.latency import PRIVATE, ROUNDS, SIZES
from attar.runtime.speculate.proposer import DraftRequest, DraftTimes, Proposer

READ = 64  # tokens of a sequence's first round
GROWTH = 2  # tokens from round to round


def measure_rounds(
    proposer: Proposer,
    context: ContextReader,
    depth: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> DraftTimes:
    """The times of a proposer that reads hidden states and drafts at most ``depth`` levels.

    Args:
        proposer: ends no draft of its own accord.
    """
    step, begin, reading = dict[int, float](), dict[int, float](), 0.0
    for width in SIZES:  # sequences
        requests = _PrivateRequests(width, len(context.pool.states) // width, context.block_size)
        if requests.length < 1:
            break
        shallow, levels = _shortest(proposer, requests, 1, clock)
        deep, deepest = _shortest(proposer, requests, depth, clock)
        step[width] = max(deep - shallow, 0.0) / max(deepest - levels, 1)
        begin[width] = max(shallow - levels * step[width], 0.0)
        _forget(proposer, width)
        if width == 1:
            reading = max(_seconds(proposer, requests(1), clock) - shallow, 0.0) / requests.length
            _forget(proposer, width)
    return DraftTimes(step, begin, reading, context.window)


class _PrivateRequests:
    """Requests of sequences that grow, each in blocks of its own."""

    def __init__(self, width: int, slots: int, block_size: int) -> None:
        self.width, self.blocks = width, slots // block_size
        self.length = min(READ, self.blocks * block_size - GROWTH * (2 * ROUNDS + 3))

    def __call__(self, depth: int) -> list[DraftRequest]:
        self.length += GROWTH
        every = [tuple(range(row * self.blocks, (row + 1) * self.blocks)) for row in range(self.width)]
        most = 1 if depth == 1 else 1 << 20
        return [
            DraftRequest(PRIVATE - row, [0] * self.length, most, blocks=blocks, depth=depth)
            for row, blocks in enumerate(every)
        ]


def _forget(proposer: Proposer, width: int) -> None:
    for row in range(width):
        proposer.forget(PRIVATE - row)


def _shortest(
    proposer: Proposer, requests: _PrivateRequests, depth: int, clock: Callable[[], float]
) -> tuple[float, int]:
    """The shortest of some rounds, and their depth."""
    times = []
    for _ in range(1 + ROUNDS):
        batch = requests(depth)
        began = clock()
        drafts = proposer.propose(batch)
        times.append(clock() - began)
    return min(times[1:]), max((_levels(draft) for draft in drafts), default=1)


def _levels(draft: Draft | None) -> int:
    return 1 if draft is None else max(draft.depths)


def _seconds(proposer: Proposer, requests: Sequence[DraftRequest], clock: Callable[[], float]) -> float:
    began = clock()
    proposer.propose(requests)
    return clock() - began
