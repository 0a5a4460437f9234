"""Rate limits: token buckets for requests and tokens a minute, and a pause that the endpoint asks for.

A bucket holds one second's worth and fills steadily, so requests are spread instead of sent in bursts: in any
minute at most the limit and one second's worth. A request that needs more than the bucket holds goes when it
is full, and leaves a debt that later ones wait for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

MINUTE = 60.0
_ROUNDING = 1e-6  # requests or tokens that rounding may lack: waiting for them would not end


class TokenBucket:
    """A bucket that fills at ``per_minute``; 0: no limit.

    Args:
        clock: seconds.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = per_minute / MINUTE
        self.size = max(self.rate, 1.0)
        self._clock = clock
        self._level, self._time = self.size, clock()

    def delay(self, amount: float) -> float:
        """Seconds until an amount may be taken."""
        if not self.rate:
            return 0.0
        now = self._clock()
        self._level = min(self.size, self._level + (now - self._time) * self.rate)
        self._time = now
        missing = min(amount, self.size) - self._level
        return missing / self.rate if missing > _ROUNDING else 0.0

    def take(self, amount: float) -> None:
        """Take an amount; a negative one gives back what was not needed."""
        self._level -= amount


class RateLimits:
    """When the next request may be sent.

    Args:
        sleep: waits for so many seconds; true: the run is being stopped.
    """

    def __init__(
        self,
        requests_per_minute: float,
        tokens_per_minute: float,
        sleep: Callable[[float], Awaitable[bool]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._requests = TokenBucket(requests_per_minute, clock)
        self._tokens = TokenBucket(tokens_per_minute, clock)
        self._sleep, self._clock = sleep, clock
        self._not_before = clock()
        self._turn = asyncio.Lock()

    async def acquire(self, tokens: float) -> bool:
        """Wait for the turn of a request with so many tokens; false: the run is being stopped."""
        async with self._turn:
            while (delay := self._delay(tokens)) > 0:
                if await self._sleep(delay):
                    return False
            self._requests.take(1)
            self._tokens.take(tokens)
            return True

    def settle(self, estimated: float, actual: float) -> None:
        """Correct the tokens of a request that were estimated."""
        self._tokens.take(actual - estimated)

    def pause(self, seconds: float) -> None:
        """Send nothing for so long: the endpoint's limits hold for all requests together."""
        self._not_before = max(self._not_before, self._clock() + seconds)

    def _delay(self, tokens: float) -> float:
        pause = self._not_before - self._clock()
        return max(pause, self._requests.delay(1), self._tokens.delay(tokens))
