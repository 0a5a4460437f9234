"""Marks in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


def split_at_mark(text: str, marks: Sequence[str]) -> tuple[str, str, str]:
    """(text before the first mark, the mark, text after it). Without a mark: (text that is in none, "", the
    end of the text that may begin one).

    Args:
        marks: none of them empty; of two at one place the longer counts.
    """
    matches = [(text.find(mark), -len(mark), mark) for mark in marks if mark in text]
    if matches:
        start, _, mark = min(matches)
        return text[:start], mark, text[start + len(mark) :]
    kept = possible_start(text, marks)
    return text[: len(text) - kept], "", text[len(text) - kept :]


def possible_start(text: str, marks: Sequence[str]) -> int:
    """Characters at the end of a text that may begin a mark."""
    for length in range(min(len(text), max(map(len, marks), default=1) - 1), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
