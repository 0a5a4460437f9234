"""What is worth another try, and when."""

import random
from datetime import UTC, datetime, timedelta

import pytest

from attar.collection.retry import CircuitBreaker, backoff, effect_of, retry_after

NOW = datetime(2026, 11, 23, 9, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "Mon, 23 Nov 2026 09:00:30 GMT"}, 30.0),
        ({"retry-after": "Mon, 23 Nov 2026 10:00:30 +0100"}, 30.0),
        ({"retry-after": "Mon, 23 Nov 2026 09:00:30 -0000"}, 30.0),
        ({"retry-after": "Mon, 23 Nov 2026 08:00:00 GMT"}, 0.0),
        ({"retry-after": "7", "retry-after-ms": "250"}, 0.25),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
    ],
)
def test_retry_after(headers, seconds):
    assert retry_after(headers, NOW) == seconds


def test_retry_after_reads_the_clock():
    date = (datetime.now(UTC) + timedelta(seconds=20)).strftime("%a, %d %b %Y %H:%M:%S GMT")
    assert retry_after({"retry-after": date}) == pytest.approx(20, abs=2)


@pytest.mark.parametrize(
    ("status", "code", "effect"),
    [
        (408, None, "retry"),
        (429, None, "retry"),
        (429, "rate_limit_exceeded", "retry"),
        (429, "insufficient_quota", "stop"),
        (500, None, "retry"),
        (503, None, "retry"),
        (529, None, "retry"),
        (400, None, "refuse"),
        (413, None, "refuse"),
        (422, None, "refuse"),
        (401, None, "stop"),
        (402, None, "stop"),
        (403, None, "stop"),
        (404, None, "stop"),
        (302, None, "stop"),
    ],
)
def test_effect_of_a_status(status, code, effect):
    assert effect_of(status, code) == effect


def test_full_jitter_doubles_up_to_a_minute():
    draw = random.Random(0)
    for attempt, longest in ((1, 2), (2, 4), (5, 32), (6, 60), (40, 60)):
        waits = [backoff(attempt, draw) for _ in range(4000)]
        assert 0 <= min(waits) < 0.01 * longest and 0.99 * longest < max(waits) <= longest
        assert sum(waits) / len(waits) == pytest.approx(longest / 2, rel=0.05)


def test_the_circuit_counts_failures_in_a_row():
    circuit = CircuitBreaker(3)
    assert [circuit.fail(), circuit.fail()] == [False, False]
    circuit.succeed()
    assert [circuit.fail(), circuit.fail(), circuit.fail()] == [False, False, True]
