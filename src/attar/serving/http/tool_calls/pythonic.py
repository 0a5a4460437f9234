"""Calls as a list in Python's syntax: Llama 3.2 and 4 with the templates that teach it.

    [get_weather(city="Paris", days=[1, 2]), now()]        perhaps between <|python_start|> and <|python_end|>

Arguments are named, and literals: nothing is evaluated. A call is known once it is closed, so its arguments
come together.
"""

from __future__ import annotations

import ast
import json
import re
import string
import warnings
from collections.abc import Sequence
from typing import Any

from attar.serving.http.tool_calls.json_value import BLANKS, control_escape
from attar.serving.http.tool_calls.marks import split_at_mark
from attar.serving.http.tool_calls.parser import CallParser

OPEN, CLOSE = "<|python_start|>", "<|python_end|>"
MAX_CALL, MAX_DEPTH = 1 << 16, 64  # characters, brackets
_NAME = frozenset(string.ascii_letters + string.digits + "_.:/-" + BLANKS)  # letters of tools' names
_ARGUMENT = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*=(?!=)(.*)", re.DOTALL)
_STRING = re.compile(r"""\"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""", re.DOTALL)
_CONTROL = re.compile(r"(?<!\\)[\x00-\x1f]")
_WORDS = {"true": True, "false": False, "null": None}  # JSON's


class PythonicCalls(CallParser):
    """An answer whose first characters are a list of calls of tools that exist; any other is text."""

    def __init__(self, tools: dict[str, Any]) -> None:
        super().__init__(tools)
        self._held, self._state = "", "lead"
        self._raw: list[str] = []  # characters of no call yet
        self._call: CallText | None = None

    def read(self, piece: str) -> None:
        states = {"lead": self._read_lead, "calls": self._read_calls, "text": self._read_text}
        text, self._held = self._held + piece, ""
        while text:
            text = states[self._state](text)

    def end(self) -> None:
        call = "" if self._call is None else self._call.text
        self.put_text("".join(self._raw) + call + self._held)

    def _read_lead(self, text: str) -> str:
        """Blanks, the mark or none, and the bracket."""
        behind = text.lstrip(BLANKS)
        behind = behind.removeprefix(OPEN).lstrip(BLANKS)
        if behind.startswith("["):
            self._raw, self._call = [text[: len(text) - len(behind) + 1]], CallText(self.tools)
            self._state = "calls"
            return behind[1:]
        if OPEN.startswith(behind):
            self._held = text
            return ""
        self._state = "text"
        return text

    def _read_calls(self, text: str) -> str:
        for position, letter in enumerate(text, 1):
            if self._call is not None:
                self._call.add(letter)
                if self._call.failed or (self._call.complete and not self._put(self._call)):
                    return self._end_with(self._call.text, text[position:])
                self._call = None if self._call.complete else self._call
            elif letter == ",":
                self._raw, self._call = [letter], CallText(self.tools)
            elif letter == "]":
                self._raw, self._state = [], "text"
                return text[position:]
            elif letter not in BLANKS:
                return self._end_with(letter, text[position:])
        return ""

    def _put(self, call: CallText) -> bool:
        """Whether it is a call; then it is put."""
        arguments = arguments_of(call.arguments)
        if arguments is None:
            return False
        self.put_call(call.name)
        self.put_arguments(arguments)
        self._raw = []
        return True

    def _end_with(self, text: str, after: str) -> str:
        """No call follows: what was held is text."""
        lead, self._raw, self._call, self._state = "".join(self._raw), [], None, "text"
        return lead + text + after

    def _read_text(self, text: str) -> str:
        """Text, without the mark that ends calls."""
        if not self._calls:
            self.put_text(text)
            return ""
        before, mark, after = split_at_mark(text, (CLOSE,))
        self.put_text(before)
        self._held = "" if mark else after
        return after if mark else ""


class CallText:
    """``name(argument, ...)``, read character by character up to its closing parenthesis.

    Args:
        names: of the tools.

    Attributes:
        name: before the parenthesis.
        arguments: the texts between its commas.
        failed: it is no call of a tool.
        complete: it is closed.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self.name, self.arguments, self.failed, self.complete = "", list[str](), False, False
        self._names, self._letters, self._cut = names, list[str](), 0
        self._depth, self._quote, self._escaped = 0, "", False

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._letters)

    def add(self, letter: str) -> None:
        """Read the next character."""
        self._letters.append(letter)
        if not self._depth:
            self._in_name(letter)
        elif self._quote:
            self._in_quotes(letter)
        elif letter in "\"'":
            self._quote = letter
        elif letter in "([{":
            self._depth += 1
        elif letter in ")]}":
            self._depth -= 1
        if self._depth <= 1 and self.name and not self._quote and letter in ",)":
            self._cut_argument(letter)
        self.failed = self.failed or self._depth > MAX_DEPTH or len(self._letters) > MAX_CALL

    def _in_name(self, letter: str) -> None:
        if letter == "(":
            self.name, self._depth, self._cut = self.text[:-1].strip(BLANKS), 1, len(self._letters)
            self.failed = self.name not in self._names
        else:
            self.failed = letter not in _NAME

    def _in_quotes(self, letter: str) -> None:
        if self._escaped:
            self._escaped = False
        elif letter == "\\":
            self._escaped = True
        elif letter == self._quote:
            self._quote = ""

    def _cut_argument(self, letter: str) -> None:
        """A comma between arguments, or the end."""
        self.complete = not self._depth
        if self.complete or letter == ",":
            self.arguments.append("".join(self._letters[self._cut : -1]))
            self._cut = len(self._letters)


def arguments_of(texts: Sequence[str]) -> str | None:
    """JSON of the arguments ``name=literal``; None where they are something else, or one comes twice.

    Args:
        texts: between the commas of a call; the last may be blank.
    """
    values: dict[str, Any] = {}
    for text in texts if texts[-1].strip() else texts[:-1]:
        match = _ARGUMENT.fullmatch(text)
        if match is None or match[1] in values:
            return None
        try:
            values[match[1]] = literal(match[2])
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return None
    try:
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # a number beyond JSON's
        return None


def literal(text: str) -> Any:
    """The value of a literal that JSON has: of Python, or with JSON's words; strings may have line breaks.

    Raises:
        SyntaxError, ValueError, MemoryError, RecursionError: it is none.
    """
    if not text.strip():
        raise ValueError("not a literal")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that Python does not know
        text = _STRING.sub(
            lambda match: _CONTROL.sub(lambda control: control_escape(control[0]), match[0]), text
        )
        return _value(ast.parse(f"({text}\n)", mode="eval").body)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # JSON's escapes
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool | int | float)):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _value(key) for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(_value, node.values), strict=True))
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    raise ValueError("not a literal")
