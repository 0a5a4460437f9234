"""Mistral: calls behind ``[TOOL_CALLS]``, in one of the forms of its tokenizers.

[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]     up to v7
[TOOL_CALLS]f{...}[TOOL_CALLS]g{...}                     v11
[TOOL_CALLS]f[CALL_ID]abc[ARGS]{...}                     v11 and v13
"""

from __future__ import annotations

from typing import Any

from attar.serving.http.tool_calls.json_value import BLANKS, JsonValue
from attar.serving.http.tool_calls.marks import split_at_mark
from attar.serving.http.tool_calls.parser import CallObjects, CallParser

MARK = "[TOOL_CALLS]"
ID, ARGS = "[CALL_ID]", "[ARGS]"
MAX_NAME = 200  # characters between the mark and the arguments


class MistralCalls(CallParser):
    """Text until ``[TOOL_CALLS]``, then objects, or a name and its arguments."""

    def __init__(self, tools: dict[str, Any]) -> None:
        super().__init__(tools)
        self._held, self._state = "", "text"
        self._objects = CallObjects(self, None)
        self._value = JsonValue()

    def read(self, piece: str) -> None:
        states = {
            "text": self._read_text,
            "mark": self._read_mark,
            "objects": self._read_objects,
            "arguments": self._read_arguments,
        }
        text, self._held = self._held + piece, ""
        while text:
            text = states[self._state](text)

    def end(self) -> None:
        if self._state == "mark":
            self.put_text(MARK + self._held)
        elif self._state == "objects":
            raw = self._objects.close()
            self.put_text(raw if self._objects.begun else MARK + raw)
        elif self._state == "text":
            self.put_text(self._held)

    def _read_text(self, text: str) -> str:
        before, mark, after = split_at_mark(text, (MARK,))
        self.put_text(before)
        if mark:
            self._state = "mark"
            return after
        self._held = after
        return ""

    def _read_mark(self, text: str) -> str:
        """A bracket or brace, or the name of a tool up to its arguments."""
        behind = text.lstrip(BLANKS)
        if behind[:1] in ("{", "["):
            self._objects, self._state = CallObjects(self, None), "objects"
            return behind
        start = behind.find("{")
        if start < 0 and len(behind) <= MAX_NAME:
            self._held = text
            return ""
        name = behind[: max(start, 0)].partition(ID)[0].removesuffix(ARGS).strip(BLANKS)
        if name not in self.tools:
            self._state = "text"
            self.put_text(MARK + text)
            return ""
        self.put_call(name)
        self._value, self._state = JsonValue(), "arguments"
        return behind[start:]

    def _read_objects(self, text: str) -> str:
        unread = self._objects.read(text)
        if not self._objects.ended:
            return ""
        self._state = "text"
        if self._objects.begun:
            return unread
        self.put_text(MARK + unread)
        return ""

    def _read_arguments(self, text: str) -> str:
        for position, letter in enumerate(text, 1):
            self._value.add(letter)
            if self._value.complete:
                self.put_arguments(text[:position])
                self._state = "text"
                return text[position:]
        self.put_arguments(text)
        return ""
