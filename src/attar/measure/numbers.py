"""Number formatting: significant digits, fitting units, and a dash for values that were not measured."""

from __future__ import annotations

import math

NOTHING = "–"
NOISE = 1e-6  # nats a token: a model differs by less from itself in another engine
NORMAL_95 = 1.96  # standard errors on either side of an estimate hold 95 % of a normal distribution


def significant(value: float | None, digits: int = 3) -> str:
    """Plain notation with ``digits`` significant digits: 16.7, 0.0213, 1,234; powers of ten below 1e-5 and
    above 1e7."""
    if value is None:
        return NOTHING
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else ("∞" if value > 0 else str(value))
    exponent = math.floor(math.log10(abs(value)))
    if not -5 <= exponent < 7:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(digits - 1 - exponent, 0)}f}"


def nats(value: float | None, digits: int = 3) -> str:
    """A KL; below what float32 and a float16 cache can tell from 0, as that bound."""
    return f"<{NOISE:.0e}".replace("e-0", "e-") if value and value < NOISE else significant(value, digits)


def nats_with_interval(value: float, stderr: float | None, digits: int = 3) -> str:
    """A KL with its 95 % interval, such as ``0.012 ± 0.003``; alone without a standard error."""
    if not stderr:
        return nats(value, digits)
    half = NORMAL_95 * stderr
    decimals = max(-math.floor(math.log10(half)), 0)
    return f"{value:.{decimals}f} ± {half:.{decimals}f}"


def fixed(value: float | None, decimals: int = 0) -> str:
    """A fixed number of decimals, with thousands separators."""
    return NOTHING if value is None or not math.isfinite(value) else f"{value:,.{decimals}f}"


def percent(fraction: float | None, decimals: int = 0) -> str:
    """A fraction as a percentage, without the % sign."""
    return NOTHING if fraction is None else f"{fraction * 100:.{decimals}f}"


def with_interval(fraction: float, stderr: float | None, decimals: int | None = None) -> str:
    """A measured fraction as a percentage with its 95 % interval, such as ``99.4 ± 0.8``; alone without a
    standard error.

    Args:
        decimals: None: as many as show one digit of the interval, two at most.
    """
    if stderr is None:
        return percent(fraction, decimals or 0)
    half = NORMAL_95 * stderr
    if decimals is None:
        decimals = min(max(-math.floor(math.log10(half * 100)), 0), 2) if half > 0 else 2
    return f"{percent(fraction, decimals)} ± {percent(half, decimals)}"


def megabytes(count: float | None) -> str:
    """Bytes as MB of 10^6 bytes, three digits: 0.84, 8.41, 84.1, 841."""
    return NOTHING if count is None else significant(count / 1e6)


def size(count: float | None) -> str:
    """Bytes with the unit that fits: kB, MB or GB (powers of 1000)."""
    if count is None:
        return NOTHING
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{significant(count / scale)} {unit}"
    return f"{count:.0f} B"


def count(number: float | None) -> str:
    """A count of parameters: 7.34 M, 1.1 B."""
    if number is None:
        return NOTHING
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{significant(number / scale)} {unit}"
    return f"{number:.0f}"


def times(ratio: float | None) -> str:
    """How many times smaller: 8.1x, 12x."""
    if ratio is None:
        return NOTHING
    return f"{ratio:.1f}x" if ratio < 9.95 else f"{ratio:,.0f}x"
