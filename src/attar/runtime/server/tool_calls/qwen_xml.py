"""Qwen3-Coder: a call in tags, whose values have the types of the tool's schema.

    <tool_call>
    <function=f>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

The type of a value is known only from the schema, so the arguments of a parameter come when it is closed.
"""

from __future__ import annotations

import json
from typing import Any

from attar.runtime.server.tool_calls.marks import split_at_mark
from attar.runtime.server.tool_calls.parser import CallParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END = "<function=", "</function>"
PARAMETER, VALUE_END = "<parameter=", "</parameter>"
MAX_NAME = 200  # characters of a tag


class QwenXmlCalls(CallParser):
    """Text until ``<function=``, inside of it parameters; ``<tool_call>`` around it is left out."""

    def __init__(self, tools: dict[str, Any]) -> None:
        super().__init__(tools)
        self._held, self._state, self._tag = "", "text", ""
        self._name, self._count = "", 0

    def read(self, piece: str) -> None:
        states = {
            "text": self._read_text,
            "function": self._read_tag,
            "parameter": self._read_tag,
            "between": self._read_between,
            "value": self._read_value,
            "after": self._read_after,
        }
        text, self._held = self._held + piece, ""
        while text:
            text = states[self._state](text)

    def end(self) -> None:
        if self._state == "text":
            self.put_text(self._held)
        elif self._state == "function":
            self.put_text(self._tag + self._held)

    def _read_text(self, text: str) -> str:
        before, mark, after = split_at_mark(text, (OPEN, FUNCTION))
        self.put_text(before)
        if not mark:
            self._held = after
            return ""
        if mark == OPEN:
            return self._read_open(after)
        self._tag, self._state = FUNCTION, "function"
        return after

    def _read_open(self, after: str) -> str:
        """``<tool_call>`` is a mark only where ``<function=`` follows."""
        behind = after.lstrip()
        if behind.startswith(FUNCTION):
            self._tag = OPEN + after[: len(after) - len(behind)] + FUNCTION
            self._state = "function"
            return behind[len(FUNCTION) :]
        if FUNCTION.startswith(behind):
            self._held = OPEN + after
            return ""
        self.put_text(OPEN)
        return after

    def _read_tag(self, text: str) -> str:
        """The name in ``<function=NAME>`` or ``<parameter=NAME>``."""
        name, closed, after = text.partition(">")
        if not closed and len(text) <= MAX_NAME:
            self._held = text
            return ""
        if self._state == "parameter":
            self._tag, self._state = name.strip(), "value"
            return after
        name = name.strip()
        if not closed or name not in self.tools:
            self._state = "text"
            self.put_text(self._tag + text)
            return ""
        self.put_call(name)
        self._name, self._count, self._state = name, 0, "between"
        return after

    def _read_between(self, text: str) -> str:
        _, mark, after = split_at_mark(text, (PARAMETER, END))
        if mark == PARAMETER:
            self._state = "parameter"
        elif mark == END:
            self.put_arguments("}" if self._count else "{}")
            self._state = "after"
        else:
            self._held = after
            return ""
        return after

    def _read_value(self, text: str) -> str:
        value, mark, after = split_at_mark(text, (VALUE_END,))
        if not mark:
            self._held = text
            return ""
        written = json.dumps(_typed(value, _schema_of(self.tools[self._name], self._tag)), ensure_ascii=False)
        lead = ", " if self._count else "{"
        self.put_arguments(f"{lead}{json.dumps(self._tag, ensure_ascii=False)}: {written}")
        self._count, self._state = self._count + 1, "between"
        return after

    def _read_after(self, text: str) -> str:
        """Nothing between ``</function>`` and ``</tool_call>``."""
        behind = text.lstrip()
        if CLOSE.startswith(behind) and behind != CLOSE:
            self._held = text
            return ""
        self._state = "text"
        return behind.removeprefix(CLOSE)


def _schema_of(parameters: Any, name: str) -> Any:
    """The schema of a parameter; None where there is none."""
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return properties.get(name) if isinstance(properties, dict) else None


def _typed(text: str, schema: Any) -> Any:
    """A value of the schema's type: text as it is, without the line breaks of its tags; else JSON."""
    text = text.removeprefix("\n").removesuffix("\n")
    kind = schema.get("type", "string") if isinstance(schema, dict) else "string"
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)
