"""Answers that are too short, too long, or cut off at the limit of their tokens.

A base model that learns from cut answers learns never to end one.
"""

from __future__ import annotations

from collections.abc import Sequence

from attar.collection.filters.row import CollectedRow, answer_of
from attar.collection.filters.settings import FilterSettings
from attar.data.words import words


def length(rows: Sequence[CollectedRow], settings: FilterSettings) -> list[str]:
    """Reasons against rows; "" keeps one."""
    return [_reason(row, settings) for row in rows]


def _reason(row: CollectedRow, settings: FilterSettings) -> str:
    if row.get("finish_reason") == "length" and not settings.keep_cut:
        return "cut off at the limit of tokens"
    count = len(words(answer_of(row)))
    if count < settings.least_words:
        return "empty" if count == 0 else f"fewer than {settings.least_words} words"
    if settings.most_words and count > settings.most_words:
        return f"more than {settings.most_words} words"
    return ""
