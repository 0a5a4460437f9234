"""When the tokens of requests come: the engine runs until it is idle, and every token is stamped."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from attar.errors import DataError
from attar.runtime.engine import Engine


@dataclass(frozen=True)
class Timed:
    """What one request wrote, and when.

    Attributes:
        tokens: of its texts.
        times: seconds of ``time.perf_counter``, one for each.
    """

    tokens: list[int]
    times: list[float]


def run_timed(engine: Engine, names: Sequence[str]) -> list[Timed]:
    """Run the engine until nothing is left; what came for each name.

    Raises:
        DataError, or what the runner raised: a request failed.
    """
    found = {name: Timed([], []) for name in names}
    while not engine.idle:
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            if event.error is not None:
                raise event.failure or DataError(event.error)
            found[event.request].tokens.extend(event.token_ids)
            found[event.request].times.extend([now] * len(event.token_ids))
    return list(found.values())


def decoded(requests: Sequence[Timed]) -> tuple[int, float]:
    """Tokens that came after every request had its first, and the seconds they took."""
    start, end = max(each.times[0] for each in requests), max(each.times[-1] for each in requests)
    return sum(stamp > start for each in requests for stamp in each.times), end - start
