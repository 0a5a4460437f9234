"""Hermes and Qwen: ``<tool_call>`` JSON ``</tool_call>``, as often as there are calls, with text around."""

from __future__ import annotations

from typing import Any

from attar.serving.http.tool_calls.json_value import BLANKS, CallObject
from attar.serving.http.tool_calls.marks import split_at_mark
from attar.serving.http.tool_calls.parser import CallParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesCalls(CallParser):
    """Text until ``<tool_call>``, a call until its JSON ends, nothing until ``</tool_call>``."""

    def __init__(self, tools: dict[str, Any]) -> None:
        super().__init__(tools)
        self._held, self._after = "", False
        self._object: CallObject | None = None
        self._lead = ""  # blanks before the object

    def read(self, piece: str) -> None:
        text, self._held = self._held + piece, ""
        while text:
            if self._object is not None:
                text = self._in_call(text)
            elif self._after:
                _, mark, text = split_at_mark(text, (CLOSE, OPEN))
                if not mark:
                    self._held = text
                    return
                self._after = False
                self._object = CallObject() if mark == OPEN else None
            else:
                before, mark, text = split_at_mark(text, (OPEN,))
                self.put_text(before)
                if not mark:
                    self._held = text
                    return
                self._object, self._lead = CallObject(), ""

    def end(self) -> None:
        if self._object is not None and not self._object.name:
            self.put_text(OPEN + self._lead + self._object.raw)
        elif self._object is None and not self._after:
            self.put_text(self._held)

    def _in_call(self, text: str) -> str:
        """Read a call; returns what is behind it."""
        call = self._object
        assert call is not None
        for position, letter in enumerate(text):
            if not call.raw and letter in BLANKS:
                self._lead += letter
                continue
            named = bool(call.name)
            call.add(letter)
            if call.name and not named:
                self.put_call(call.name)
            if call.complete or call.failed:
                self._object, self._after = None, bool(call.name)
                if call.name:
                    self.put_arguments(call.take())
                else:
                    self.put_text(OPEN + self._lead + call.raw)
                return text[position + 1 :]
        self.put_arguments(call.take())
        return ""
