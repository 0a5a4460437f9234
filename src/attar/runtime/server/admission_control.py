"""Who may come in: not more than the queue holds, no caller beyond its share, nobody while it goes down.

What is counted is texts, prompts times ``n``, from a request's admission to its last byte; besides these what
waits in the engine, which has preempted texts too.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attar.runtime.server.api_keys import ApiKey
from attar.runtime.server.backend import Backend
from attar.runtime.server.errors import ApiError

LONGEST_RETRY_S = 60
_WEIGHT = 0.1  # of the newest request in the mean duration
ANONYMOUS = ApiKey(name="anyone")


class AdmissionControl:
    """Admission and drain.

    Args:
        backend: tells how much is waiting.
        max_queue: texts that wait at most.
        share: of all places that one caller may take.
        clock: seconds.
    """

    def __init__(
        self,
        backend: Backend,
        max_queue: int,
        share: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend, self._max_queue, self._share, self._clock = backend, max_queue, share, clock
        self.draining = False
        self.arriving = 0
        self._mean_s = 1.0
        self._inside: dict[int, Callable[[], None]] = {}
        self._next = 0
        self._texts: Counter[str] = Counter()  # by caller, from admission to the last byte
        self._spent: dict[str, tuple[float, float]] = {}  # by caller: tokens owed, and when

    @property
    def active(self) -> int:
        """Requests from admission to their last byte."""
        return len(self._inside)

    def admit(self, count: int = 1, caller: ApiKey = ANONYMOUS) -> None:
        """Raises RefusedError where ``count`` more texts cannot be taken: 503, 429, or 400 for ever."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_s=1)
        if not self._backend.alive:
            raise ApiError(503, "the engine has stopped", code="engine_stopped")
        stats = self._backend.stats()
        places = self._max_queue + stats.free
        if count > places + stats.running:
            message = f"{count:,} texts in one request; the server holds {places + stats.running:,}"
            raise ApiError(400, message, param="n", code="too_many_texts")
        waiting = stats.waiting + self.arriving
        if waiting + count > places or self._texts.total() + count > places + stats.running:
            message = f"{waiting:,} requests are waiting, the limit is {self._max_queue:,}"
            raise ApiError(429, message, code="queue_full", retry_s=self.retry_s())
        self._admit_caller(count, caller, places + stats.running)

    @contextmanager
    def inside(
        self, give_up: Callable[[], None], count: int = 1, caller: ApiKey = ANONYMOUS
    ) -> Iterator[None]:
        """Counts a request until it is answered; the drain waits for it.

        Args:
            give_up: called where it takes too long.
            count: its texts.
        """
        number, self._next = self._next, self._next + 1
        self._inside[number] = give_up
        try:
            with self._counted(count, caller):
                yield
        finally:
            del self._inside[number]

    def give_up(self) -> None:
        """Nobody waits any more for those inside: they are told so."""
        for give_up in list(self._inside.values()):
            give_up()

    @contextmanager
    def entering(self, count: int = 1, caller: ApiKey = ANONYMOUS) -> Iterator[None]:
        """Counts texts while they are made ready for the engine."""
        self.admit(count, caller)
        self.arriving += count
        try:
            with self._counted(count, caller):
                yield
        finally:
            self.arriving -= count

    def took(self, seconds: float, tokens: int = 0, caller: ApiKey = ANONYMOUS) -> None:
        """A request was served in so many seconds; its caller owes its tokens."""
        self._mean_s += _WEIGHT * (seconds - self._mean_s)
        if caller.tokens_per_minute:
            self._spent[caller.name] = (self._owed(caller) + tokens, self._clock())

    def retry_s(self) -> int:
        """Seconds until there is probably room: the time in which as many requests as wait are served."""
        stats = self._backend.stats()
        seconds = self._mean_s * (stats.waiting + 1) / max(stats.running, 1)
        return max(1, min(math.ceil(seconds), LONGEST_RETRY_S))

    def _admit_caller(self, count: int, caller: ApiKey, places: int) -> None:
        """Raises RefusedError where the caller has its share already."""
        most = caller.max_texts or max(1, int(self._share * places))
        if count > most:
            message = f"{count:,} texts in one request; {caller.name} may have {most:,}"
            raise ApiError(400, message, param="n", code="too_many_texts")
        if self._texts[caller.name] + count > most:
            message = f"{caller.name} has {self._texts[caller.name]:,} texts open, the limit is {most:,}"
            raise ApiError(429, message, code="too_many_requests", retry_s=self.retry_s())
        if (owed := self._owed(caller)) >= caller.tokens_per_minute > 0:
            wait = math.ceil(60 * (owed / caller.tokens_per_minute - 1)) + 1
            message = f"{caller.name} has used its {caller.tokens_per_minute:,} tokens of a minute"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_s=wait)

    @contextmanager
    def _counted(self, count: int, caller: ApiKey) -> Iterator[None]:
        self._texts[caller.name] += count
        try:
            yield
        finally:
            self._texts[caller.name] -= count
            if not self._texts[caller.name]:
                del self._texts[caller.name]

    def _owed(self, caller: ApiKey) -> float:
        """Tokens used that no minute has paid for yet."""
        owed, then = self._spent.get(caller.name, (0.0, 0.0))
        return max(0.0, owed - (self._clock() - then) * caller.tokens_per_minute / 60)
