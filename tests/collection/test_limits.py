"""Token buckets and pauses, against the limit counted in every window of a minute."""

import asyncio
import bisect

import pytest

from attar.collection.limits import RateLimits, TokenBucket


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    async def sleep(self, seconds):
        self.now += seconds
        return False


def sent(limits, clock, needs, takes=0.0):
    """When each of some requests is sent; one takes so many seconds before the next is asked for."""
    times = []

    async def run():
        for need in needs:
            assert await limits.acquire(need)
            times.append(clock.now)
            clock.now += takes

    asyncio.run(run())
    return times


@pytest.mark.parametrize("per_minute", [7, 60, 600])
def test_no_minute_has_more_requests_than_the_limit(per_minute):
    clock = Clock()
    times = sent(RateLimits(per_minute, 0, clock.sleep, clock), clock, [1] * per_minute * 3)
    size = max(per_minute / 60, 1)
    for number, start in enumerate(times):
        assert bisect.bisect_left(times, start + 60 - 1e-6) - number <= per_minute + size
    assert (times[-1] - times[0]) == pytest.approx(60 * (3 * per_minute - size) / per_minute, rel=1e-6)


def test_no_minute_has_more_tokens_than_the_limit():
    clock = Clock()
    needs = [100, 3000, 50, 900, 10] * 20
    times = sent(RateLimits(0, 6000, clock.sleep, clock), clock, needs)
    for number, start in enumerate(times):
        end = bisect.bisect_left(times, start + 60 - 1e-6)
        # the last one of a window may be larger than the bucket: it leaves a debt
        assert sum(needs[number : end - 1]) <= 6000 + 100
    assert times[-1] - times[0] == pytest.approx((sum(needs[:-1]) - 100 + 10) / 100, abs=1.0)


def test_tokens_that_were_not_needed_are_given_back():
    clock = Clock()
    limits = RateLimits(0, 60, clock.sleep, clock)

    async def run():
        for _ in range(10):
            await limits.acquire(600)
            limits.settle(600, 1)

    asyncio.run(run())
    assert clock.now - 100 == pytest.approx(9.0, abs=1.1)


def test_a_slow_caller_waits_for_nothing():
    clock = Clock()
    times = sent(RateLimits(60, 0, clock.sleep, clock), clock, [1] * 5, takes=2.0)
    assert times == [100, 102, 104, 106, 108]


def test_a_pause_holds_for_all():
    clock = Clock()
    limits = RateLimits(0, 0, clock.sleep, clock)
    assert sent(limits, clock, [1]) == [100.0]
    limits.pause(5)
    limits.pause(3)
    assert sent(limits, clock, [1, 1]) == [105.0, 105.0]


def test_a_stop_ends_the_wait():
    async def stopped(seconds):
        return True

    limits = RateLimits(1, 0, stopped, Clock())
    assert asyncio.run(limits.acquire(1))
    assert not asyncio.run(limits.acquire(1))


def test_without_a_limit_nothing_waits():
    assert TokenBucket(0).delay(1e9) == 0.0
