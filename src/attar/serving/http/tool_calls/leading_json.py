"""Answers that are a call, or calls, in plain JSON: Llama 3, and models that were never taught a form.

{"name": "f", "parameters": {...}}; {"name": ...}       Llama 3, perhaps behind <|python_tag|>
[{"name": "f", "arguments": {...}}, ...]                a list; perhaps inside of ```json
"""

from __future__ import annotations

from typing import Any

from attar.serving.http.tool_calls.json_value import BLANKS
from attar.serving.http.tool_calls.marks import split_at_mark
from attar.serving.http.tool_calls.parser import CallObjects, CallParser

FENCE = "```"
LEADS = ("<|python_tag|>", "```json", FENCE)


class LeadingJsonCalls(CallParser):
    """An answer whose first characters are JSON of a tool that exists is calls; any other is text."""

    def __init__(self, tools: dict[str, Any]) -> None:
        super().__init__(tools)
        self._objects = CallObjects(self, tools)
        self._lead, self._held, self._state = "", "", "lead"
        self._fenced = False  # the calls are inside of a fence, whose end is no text

    def read(self, piece: str) -> None:
        if self._state == "lead":
            piece = self._read_lead(piece)
        if self._state == "objects":
            piece = self._read_objects(piece)
        if self._state == "text":
            self._read_text(piece)

    def end(self) -> None:
        if self._state == "text":
            self.put_text(self._held)
            return
        raw = self._objects.close()
        self.put_text(raw if self._objects.begun else self._lead + raw)

    def _read_lead(self, piece: str) -> str:
        """Decide by the first characters that are neither blank nor a lead; returns what is behind these."""
        text = self._lead + piece
        behind_blanks = text.lstrip(BLANKS)
        lead = next((lead for lead in LEADS if behind_blanks.startswith(lead)), "")
        behind = behind_blanks[len(lead) :].lstrip(BLANKS)
        if behind[:1] in ("{", "["):
            self._lead, self._state = text[: len(text) - len(behind)], "objects"
            self._fenced = lead.startswith(FENCE)
            return behind
        if behind and not any(mark.startswith(behind_blanks) for mark in LEADS):
            self._lead, self._state = "", "text"
            return text
        self._lead = text
        return ""

    def _read_objects(self, piece: str) -> str:
        unread = self._objects.read(piece)
        if not self._objects.ended:
            return ""
        self._state = "text"
        if self._objects.begun:
            return unread
        self._fenced = False
        return self._lead + unread

    def _read_text(self, piece: str) -> None:
        if not self._fenced:
            self.put_text(piece)
            return
        before, mark, after = split_at_mark(self._held + piece, (FENCE,))
        self._fenced, self._held = not mark, "" if mark else after
        self.put_text(before + after if mark else before)
