"""Strings that end a text, found as the text comes in pieces.

A stop string may begin in one token and end in another, so text that could still become one is held back; the
text is cut where the earliest begins.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Looks for strings in text that comes in pieces.

    Args:
        stops: strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.match: str | None = None
        self._held = ""
        self._longest = max(map(len, self.stops), default=0)

    def add(self, piece: str) -> str:
        """The text that can be shown now. Where a stop string is complete, ``match`` is it, and the text ends
        before the earliest that is there; of two that begin together the longer one is named.
        """
        assert self.match is None, "the text has ended"
        text = self._held + piece
        matches = [(text.find(stop), -len(stop), stop) for stop in self.stops if stop in text]
        if matches:
            start, _, self.match = min(matches)
            self._held = ""
            return text[:start]
        keep = self._possible(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """What is held back, when the text ends otherwise."""
        text, self._held = self._held, ""
        return text

    def _possible(self, text: str) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stops):
                return length
        return 0
