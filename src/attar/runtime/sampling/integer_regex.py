"""A regular expression of the integers in a range, of any size."""

from __future__ import annotations


def integer_regex(low: int | None, high: int | None) -> str:
    """Integers from ``low`` to ``high``, as JSON writes them; None: without a bound.

    Raises:
        ValueError: there is none.
    """
    if low is not None and high is not None and low > high:
        raise ValueError(f"no integer is from {low} to {high}")
    parts = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        parts.append("-" + _group(_natural(least, None if low is None else -low)))
    if high is None or high >= 0:
        parts.append(_group(_natural(max(low or 0, 0), high)))
    return _group(parts)


def _natural(low: int, high: int | None) -> list[str]:
    """Integers from 0 on, by their number of digits."""
    digits, parts = len(str(low)), list[str]()
    while high is None or digits <= len(str(high)):
        least, most = max(low, 10 ** (digits - 1) if digits > 1 else 0), 10**digits - 1
        if high is not None and high < most:
            return [*parts, _same_length(str(least), str(high))]
        if high is None and least > low:
            return [*parts, f"[1-9][0-9]{{{digits - 1},}}"]
        parts.append(_same_length(str(least), str(most)))
        digits += 1
    return parts


def _same_length(low: str, high: str) -> str:
    """Between two numbers of as many digits, zeros in front included."""
    if low == high:
        return low
    if set(low) == {"0"} and set(high) == {"9"}:
        return f"[0-9]{{{len(low)}}}"
    if low[0] == high[0]:
        return low[0] + _same_length(low[1:], high[1:])
    count, parts = len(low) - 1, []
    first, last = int(low[0]), int(high[0])
    if count and set(low[1:]) != {"0"}:
        parts.append(low[0] + _same_length(low[1:], "9" * count))
        first += 1
    if count and set(high[1:]) != {"9"}:
        parts.append(high[0] + _same_length("0" * count, high[1:]))
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}]" + (f"[0-9]{{{count}}}" if count else ""))
    return _group(parts)


def _group(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"({'|'.join(parts)})"
