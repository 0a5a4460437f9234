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
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from attar.runtime.sampling.json_schema import UnsupportedSchemaError, resolve
from attar.serving.http.tool_calls.marks import split_at_mark
from attar.serving.http.tool_calls.parser import CallParser
from attar.serving.http.tool_calls.tag_value import END as END_OF_VALUE
from attar.serving.http.tool_calls.tag_value import read_value

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END = "<function=", "</function>"
PARAMETER, VALUE_TAG, VALUE_END = "<parameter=", "</parameter>", re.compile(END_OF_VALUE)
MAX_NAME = 200  # characters of a tag


class QwenXmlCalls(CallParser):
    """Text until ``<function=``, inside of it parameters; ``<tool_call>`` around it is left out."""

    def __init__(self, tools: dict[str, Any]) -> None:
        super().__init__(tools)
        self._held, self._state, self._tag = "", "text", ""
        self._name, self._count = "", 0
        self._searched = 0  # characters of a value in which its end is not

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
        elif self._state == "value" and self._held.rstrip().endswith(VALUE_TAG):
            self._put_value(self._held.rstrip().removesuffix(VALUE_TAG))

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
        _, mark, after = split_at_mark(text, (PARAMETER, END, CLOSE))
        if mark == PARAMETER:
            self._state = "parameter"
        elif mark:
            self.put_arguments("}" if self._count else "{}")
            self._state = "after" if mark == END else "text"
        else:
            self._held = after
            return ""
        return after

    def _read_value(self, text: str) -> str:
        end = VALUE_END.search(text, self._searched)
        if end is None:  # the tag has not come, or what follows it has not
            tag = text.rfind(VALUE_TAG, self._searched)
            self._held, self._searched = text, tag if tag >= 0 else max(len(text) - len(VALUE_TAG), 0)
            return ""
        self._searched = 0
        self._put_value(text[: end.start()])
        return text[end.end() :]

    def _put_value(self, value: str) -> None:
        parameters = self.tools[self._name]
        value = value.removeprefix("\n").removesuffix("\n")  # of the tags
        read = read_value(value, _schema_of(parameters, self._tag), parameters)
        written = json.dumps(read, ensure_ascii=False)
        lead = ", " if self._count else "{"
        self.put_arguments(f"{lead}{json.dumps(self._tag, ensure_ascii=False)}: {written}")
        self._count, self._state = self._count + 1, "between"

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
    with suppress(UnsupportedSchemaError):
        parameters = resolve(parameters, parameters)
    parameters = parameters if isinstance(parameters, Mapping) else {}
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return parameters.get("additionalProperties") if schema is None else schema
