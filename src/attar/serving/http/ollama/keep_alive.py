"""``keep_alive``: how long a model stays loaded after a request; seconds, or a text such as ``1h30m``."""

from __future__ import annotations

import math
import re

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)"
_DURATION = re.compile(rf"[+-]?(?:0|(?:{_PART})+)", re.ASCII)


def keep_seconds(value: float | str | None) -> float:
    """Seconds; infinite for a negative value, as at Ollama, and without one.

    Raises:
        ValueError: a text that is no duration in Go's notation.
    """
    if value is None:
        return math.inf
    if isinstance(value, str):
        if len(value) > 100 or not _DURATION.fullmatch(value):
            raise ValueError("it is a number of seconds or a duration such as 5m, 1h30m or -1s")
        seconds = sum(float(number) * _UNITS[unit] for number, unit in re.findall(_PART, value))
        value = -seconds if value.startswith("-") else seconds
    return math.inf if value < 0 else value
