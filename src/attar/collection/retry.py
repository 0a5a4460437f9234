"""Which failures are worth another try, and when.

    wait ~ U(0, min(60, 2^k)) seconds before try k + 1, at least what Retry-After asks for

Full jitter (Brooker 2015, "Exponential Backoff and Jitter"): requests that failed together do not come back
together. A circuit ends the run after N failures in a row, whichever requests they were: an endpoint that is
down, or refuses a parameter, would refuse the other ten thousand, too. The ``openai`` client's own retries
are off: a pause that the endpoint asks for holds for all workers here, and each try counts against the
budget.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

LONGEST_S = 60.0

_AGAIN = (408, 409, 425, 429)
_OF_THE_REQUEST = (400, 413, 415, 422)
_SPENT_CODES = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active")


@dataclass(frozen=True)
class TeacherFailure:
    """Why there is no answer; the message has no key in it.

    Attributes:
        effect: ``retry``; ``refuse``: this request can have no answer; ``stop``: no request can.
        retry_after: seconds that the endpoint asks to wait.
        limited: the endpoint is well, but asked too often.
        charged: the endpoint may have worked on an answer, and charge for it.
    """

    message: str
    effect: str
    retry_after: float | None = None
    limited: bool = False
    charged: bool = False
    hint: str | None = None


def effect_of(status: int, code: str | None = None) -> str:
    """The effect of an HTTP status, with the endpoint's code for the error where it gives one."""
    if code in _SPENT_CODES:
        return "stop"
    if status in _AGAIN or status >= 500:
        return "retry"
    return "refuse" if status in _OF_THE_REQUEST else "stop"


def backoff(attempt: int, draw: random.Random) -> float:
    """Seconds to wait after a try, the first of which is 1."""
    return draw.uniform(0.0, min(LONGEST_S, 2.0**attempt))


def retry_after(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Seconds that a response asks to wait (RFC 9110, section 10.2.3: seconds, or a date); None: it does not.

    ``retry-after-ms``, which some endpoints send as well, is finer and goes first.
    """
    milliseconds = _seconds(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    value = headers.get("retry-after")
    seconds = _seconds(value)
    if value is None or seconds is not None:
        return seconds
    try:
        date = parsedate_to_datetime(value)
    except (ValueError, OverflowError, TypeError):
        return None
    date = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max((date - (now or datetime.now(UTC))).total_seconds(), 0.0)


def _seconds(value: str | None) -> float | None:
    try:
        seconds = float(value or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None


class CircuitBreaker:
    """Counts failures in a row."""

    def __init__(self, most_failures: int) -> None:
        self._most = most_failures
        self.failures = 0

    def succeed(self) -> None:
        """An answer came."""
        self.failures = 0

    def fail(self) -> bool:
        """None came; true: that is too many in a row."""
        self.failures += 1
        return self.failures >= self._most
