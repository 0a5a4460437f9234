"""Regular expressions from files and options, matched within a bound: some need time exponential in the
length of a name, or memory in the product of their repetitions, and ``re`` holds the interpreter meanwhile.

    check      refuses what is no pattern, is long, or is larger than SIZE with its repetitions written out
    search     ``regex`` matches, which gives up after SECONDS and lets other threads run meanwhile
"""

from __future__ import annotations

import re
from functools import lru_cache
from re import _parser  # type: ignore[attr-defined]
from typing import Any

import regex

from attar.errors import CheckpointError

LONGEST = 4096  # characters
SIZE = 10_000  # single characters and sets, each repetition counted
SECONDS = 1.0  # of one match


class RegexError(CheckpointError):
    """A regular expression that is none, or not one that can be matched in time."""


def search(pattern: str, name: str, where: str = "") -> bool:
    """Whether the pattern matches somewhere in a name, like ``re.search``.

    Args:
        where: the file and the field, for the message.

    Raises:
        RegexError: see :func:`check`; or the match takes more than SECONDS.
    """
    return _matches("search", pattern, name, where)


def matches_start(pattern: str, name: str, where: str = "") -> bool:
    """Whether a name starts with a match of the pattern, like ``re.match``; see :func:`search`."""
    return _matches("match", pattern, name, where)


def _matches(method: str, pattern: str, name: str, where: str) -> bool:
    match = getattr(_compiled(pattern, where), method)
    try:
        return match(name, timeout=SECONDS, concurrent=True) is not None
    except TimeoutError:
        raise _refused(pattern, f"takes more than {SECONDS:g} s for {name[:60]!r}", where) from None


def check(pattern: str, where: str = "") -> None:
    """Refuse what is no regular expression, or one that is too long or too large.

    Raises:
        RegexError: names the pattern.
    """
    _compiled(pattern, where)


@lru_cache(maxsize=4096)
def _compiled(pattern: str, where: str) -> Any:
    if len(pattern) > LONGEST:
        raise _refused(pattern, f"has {len(pattern)} characters, more than {LONGEST}", where)
    try:
        size = _size(_parser.parse(pattern))
        if size > SIZE:
            raise _refused(pattern, f"is {size:,} characters with its repetitions, more than {SIZE:,}", where)
        return regex.compile(pattern)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise _refused(pattern, f"is no regular expression ({error})", where) from error


def _size(part: Any) -> int:
    """Of a parsed pattern, or of a part of it: what it repeats counts as often as it must, or at most may."""
    if isinstance(part, tuple) and len(part) == 2 and str(part[0]).endswith("_REPEAT"):
        least, most, inner = part[1]
        times: int = max(least, 1 if str(most) == "MAXREPEAT" else most, 1)
        return times * max(_size(inner), 1)
    if isinstance(part, list | tuple) or hasattr(part, "data"):
        return sum(map(_size, part))
    return 0 if part is None else 1


def _refused(pattern: str, why: str, where: str) -> RegexError:
    prefix = f"{where}: " if where else ""
    hint = "write it without nested repetitions" if " s for " in why else None
    return RegexError(f"{prefix}the pattern {pattern[:60]!r} {why}", hint=hint)
