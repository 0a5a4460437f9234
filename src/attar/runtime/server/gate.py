"""Who may come in: not more than the queue holds, and nobody once the server is going down.

A request is *arriving* from its admission until the engine has it; then the engine's own count of waiting
requests holds it. Places that are free are filled at the engine's next step, so a burst that comes before it
may be larger by as many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attar.runtime.server.backend import Backend
from attar.runtime.server.failures import RefusedError

LONGEST_RETRY_S = 60
_WEIGHT = 0.1  # of the newest request in the mean duration


class Gate:
    """Admission and drain.

    Args:
        backend: tells how much is waiting.
        max_queue: requests that wait at most.
    """

    def __init__(self, backend: Backend, max_queue: int) -> None:
        self._backend, self._max_queue = backend, max_queue
        self.draining = False
        self.arriving = 0
        self._mean_s = 1.0
        self._inside: dict[int, Callable[[], None]] = {}
        self._next = 0

    @property
    def active(self) -> int:
        """Requests from admission to their last byte."""
        return len(self._inside)

    def admit(self, count: int = 1) -> None:
        """Raises RefusedError where ``count`` more requests cannot be taken: 503 or 429."""
        if self.draining:
            raise RefusedError(503, "the server is shutting down", code="shutting_down", retry_s=1)
        if not self._backend.alive:
            raise RefusedError(503, "the engine has stopped", code="engine_stopped")
        stats = self._backend.stats()
        waiting = stats.waiting + self.arriving
        if waiting and waiting + count > self._max_queue + stats.free:
            message = f"{waiting:,} requests are waiting, the limit is {self._max_queue:,}"
            raise RefusedError(429, message, code="queue_full", retry_s=self.retry_s())

    @contextmanager
    def inside(self, give_up: Callable[[], None]) -> Iterator[None]:
        """Counts a request until it is answered; the drain waits for it.

        Args:
            give_up: called where it takes too long.
        """
        number, self._next = self._next, self._next + 1
        self._inside[number] = give_up
        try:
            yield
        finally:
            del self._inside[number]

    def give_up(self) -> None:
        """Nobody waits any more for those inside: they are told so."""
        for give_up in list(self._inside.values()):
            give_up()

    @contextmanager
    def entering(self, count: int = 1) -> Iterator[None]:
        """Counts requests while they are made ready for the engine."""
        self.admit(count)
        self.arriving += count
        try:
            yield
        finally:
            self.arriving -= count

    def took(self, seconds: float) -> None:
        """A request was served in so many seconds."""
        self._mean_s += _WEIGHT * (seconds - self._mean_s)

    def retry_s(self) -> int:
        """Seconds until there is probably room: the time in which as many requests as wait are served."""
        stats = self._backend.stats()
        seconds = self._mean_s * (stats.waiting + 1) / max(stats.running, 1)
        return max(1, min(math.ceil(seconds), LONGEST_RETRY_S))
