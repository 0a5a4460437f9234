"""Admission control: a bounded queue, a share for each caller, and no new requests while the server drains.

Completions (prompts * ``n``) are counted from a request's admission to its last byte; to these come those
that wait in the engine, preempted ones included. Each model has its own queue and shares; the limits of
a key, draining and shutting down are the server's.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from attar.serving.http.api_keys import ApiKey
from attar.serving.http.backend import Stats
from attar.serving.http.errors import ApiError

MAX_RETRY_S = 60
_WEIGHT = 0.1  # of the newest request in the mean duration
ANONYMOUS = ApiKey(name="anyone")


class EngineLoad(Protocol):
    """What is asked of an engine; see :class:`attar.serving.http.backend.Backend`."""

    @property
    def alive(self) -> bool: ...

    def stats(self) -> Stats:
        """How many completions run and wait."""
        ...


@dataclass
class OpenRequests:
    """The requests of all models of a server.

    Attributes:
        active: what ends a request early, by its number.
        completions: of each caller, from admission to the last byte.
        budgets: of each caller: tokens over budget, and when that was.
    """

    draining: bool = False
    active: dict[int, Callable[[], None]] = field(default_factory=dict)
    completions: Counter[str] = field(default_factory=Counter)
    budgets: dict[str, tuple[float, float]] = field(default_factory=dict)
    last: int = 0


class AdmissionControl:
    """Admits requests to a model, and counts the running requests.

    Args:
        backend: reports how many completions run and wait.
        max_queue: completions that may wait.
        share: of the whole capacity, for one caller.
        clock: seconds.
        requests: of all models; None: there is no other model.
    """

    def __init__(
        self,
        backend: EngineLoad,
        max_queue: int,
        share: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        requests: OpenRequests | None = None,
    ) -> None:
        self._backend, self._max_queue, self._share, self._clock = backend, max_queue, share, clock
        self._requests = requests or OpenRequests()
        self.arriving = 0
        self._mean_s = 1.0
        self._completions: Counter[str] = Counter()  # of this model, by caller

    def of(self, backend: EngineLoad) -> AdmissionControl:
        """The same of another model of the server."""
        return AdmissionControl(backend, self._max_queue, self._share, self._clock, self._requests)

    @property
    def draining(self) -> bool:
        """Whether the server takes no new requests."""
        return self._requests.draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        self._requests.draining = draining

    @property
    def active(self) -> int:
        """Requests of all models, from admission to their last byte."""
        return len(self._requests.active)

    def admit(self, count: int = 1, caller: ApiKey = ANONYMOUS) -> None:
        """Raise ApiError where ``count`` more completions are refused: 503, 429, or 400 if they never fit."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_s=1)
        if not self._backend.alive:
            raise ApiError(503, "the engine has stopped", code="engine_stopped")
        stats = self._backend.stats()
        queue_room = self._max_queue + stats.free
        capacity = queue_room + stats.running
        if count > capacity:
            message = f"{count:,} completions in one request; the server holds {capacity:,}"
            raise ApiError(400, message, param="n", code="too_many_texts")
        waiting = stats.waiting + self.arriving
        if waiting + count > queue_room or self._completions.total() + count > capacity:
            message = f"{waiting:,} requests are waiting, the limit is {self._max_queue:,}"
            raise ApiError(429, message, code="queue_full", retry_s=self.retry_s())
        self._admit_caller(count, caller, capacity)

    @contextmanager
    def preparing(self, count: int = 1, caller: ApiKey = ANONYMOUS) -> Iterator[None]:
        """Admit completions, and count them until they are submitted to the engine."""
        self.admit(count, caller)
        self.arriving += count
        try:
            with self._counted(count, caller):
                yield
        finally:
            self.arriving -= count

    @contextmanager
    def serving(
        self, shut_down: Callable[[], None], count: int = 1, caller: ApiKey = ANONYMOUS
    ) -> Iterator[None]:
        """Count a request until it is answered; draining waits for it.

        Args:
            shut_down: ends the request early.
        """
        self._requests.last += 1
        number = self._requests.last
        self._requests.active[number] = shut_down
        try:
            with self._counted(count, caller):
                yield
        finally:
            del self._requests.active[number]

    def shut_down(self) -> None:
        """End all active requests, of all models."""
        for shut_down in list(self._requests.active.values()):
            shut_down()

    def served(self, seconds: float, tokens: int = 0, caller: ApiKey = ANONYMOUS) -> None:
        """Record a request's duration, and charge its tokens to the caller."""
        self._mean_s += _WEIGHT * (seconds - self._mean_s)
        if caller.tokens_per_minute:
            self._requests.budgets[caller.name] = (self._over_budget(caller) + tokens, self._clock())

    def retry_s(self) -> int:
        """Estimated seconds until a request can be admitted: the time to serve the requests that wait now."""
        stats = self._backend.stats()
        seconds = self._mean_s * (stats.waiting + 1) / max(stats.running, 1)
        return max(1, min(math.ceil(seconds), MAX_RETRY_S))

    def _admit_caller(self, count: int, caller: ApiKey, capacity: int) -> None:
        """Raise ApiError where the caller has used its share."""
        limit = caller.max_texts or max(1, int(self._share * capacity))
        if count > limit:
            message = f"{count:,} completions in one request; {caller.name} may have {limit:,}"
            raise ApiError(400, message, param="n", code="too_many_texts")
        running = (self._requests.completions if caller.max_texts else self._completions)[caller.name]
        if running + count > limit:
            message = f"{caller.name} has {running:,} completions open, the limit is {limit:,}"
            raise ApiError(429, message, code="too_many_requests", retry_s=self.retry_s())
        if (tokens := self._over_budget(caller)) >= caller.tokens_per_minute > 0:
            wait_s = math.ceil(60 * (tokens / caller.tokens_per_minute - 1)) + 1
            message = f"{caller.name} has used its {caller.tokens_per_minute:,} tokens of a minute"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_s=wait_s)

    @contextmanager
    def _counted(self, count: int, caller: ApiKey) -> Iterator[None]:
        counters = (self._completions, self._requests.completions)
        for counter in counters:
            counter[caller.name] += count
        try:
            yield
        finally:
            for counter in counters:
                counter[caller.name] -= count
                if not counter[caller.name]:
                    del counter[caller.name]

    def _over_budget(self, caller: ApiKey) -> float:
        """Tokens used less the tokens that the time since has paid for."""
        tokens, then = self._requests.budgets.get(caller.name, (0.0, 0.0))
        return max(0.0, tokens - (self._clock() - then) * caller.tokens_per_minute / 60)
