"""JSON that comes character by character: where a value ends, its strings repaired, the fields of a call."""

from __future__ import annotations

import json
from collections.abc import Collection

BLANKS = " \t\r\n"
ARGUMENTS = ("arguments", "parameters")
_ESCAPES = '"\\/bfnrtu'


class JsonValue:
    """Finds the end of one value, of which the first character is no blank.

    A value ends with its closing bracket or quote; a number or a word ends before the character after it,
    which then is not part of it.
    """

    def __init__(self) -> None:
        self.complete = False
        self._depth, self._quoted, self._escaped, self._bare = 0, False, False, False

    def add(self, letter: str) -> bool:
        """Whether the next character is part of the value."""
        if self._quoted:
            self._in_quotes(letter)
        elif self._bare:
            self.complete = letter in BLANKS or letter in ",:;]}"
            return not self.complete
        elif letter == '"':
            self._quoted = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "]}":
            self._depth -= 1
            self.complete = self._depth <= 0
        elif not self._depth:
            self._bare = True
        return True

    def _in_quotes(self, letter: str) -> None:
        if self._escaped:
            self._escaped = False
        elif letter == "\\":
            self._escaped = True
        elif letter == '"':
            self._quoted = False
            self.complete = not self._depth


class StringRepair:
    """Makes strings of JSON what they can only mean, as they come: control characters inside of them, a raw
    line break above all, are escaped, and so is a backslash that begins no escape. JSON stays as it is."""

    def __init__(self) -> None:
        self._quoted, self._backslash = False, False

    def add(self, text: str) -> str:
        """The next characters; a backslash waits for what it escapes."""
        return "".join(map(self._letter, text))

    def end(self) -> str:
        """What waits, where the text is cut."""
        held, self._backslash = "\\" * self._backslash, False
        return held

    def _letter(self, letter: str) -> str:
        if self._backslash:
            self._backslash = False
            if letter in _ESCAPES:
                return "\\" + letter
            return letter if letter == "'" else control_escape(letter) or "\\\\" + letter
        if not self._quoted:
            self._quoted = letter == '"'
            return letter
        self._backslash, self._quoted = letter == "\\", letter != '"'
        return "" if self._backslash else control_escape(letter) or letter


def control_escape(letter: str) -> str:
    """The escape of a control character in JSON and Python; empty for any other."""
    return json.dumps(letter)[1:-1] if letter < " " else ""


class CallObject:
    """Reads ``{"name": ..., "arguments": {...}}``: the name, and the arguments as they come.

    ``parameters`` is another word for arguments; arguments that are a string of JSON are unquoted; other
    fields are passed over. Arguments that come before the name wait for it.

    Args:
        names: of the tools; None: any name is a call.

    Attributes:
        name: once it is known.
        raw: all characters so far.
        failed: it is no call. Where the name is known the call has begun, and what came of it counts.
        complete: its closing bracket has come.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self.name, self.raw, self.failed, self.complete = "", "", False, False
        self._names, self._next = names, "start"
        self._key, self._text = "", list[str]()
        self._value = JsonValue()
        self._arguments, self._had_arguments = list[str](), False
        self._streamed = False  # the value that is read is the arguments, and goes on as it comes

    def add(self, letter: str) -> None:
        """Read the next character."""
        if not self.name:
            self.raw += letter
        if self._next == "value":
            self._in_value(letter)
        elif self._next == "key":
            self._in_key(letter)
        elif letter not in BLANKS:
            self._between(letter)

    def take(self) -> str:
        """The arguments that have come since the last time; none before the name is known."""
        if not self.name:
            return ""
        written, self._arguments = "".join(self._arguments), []
        if (self.complete or self.failed) and not self._had_arguments:
            self._had_arguments = True
            return "{}"
        return written

    def _between(self, letter: str) -> None:
        """What is neither in a key nor in a value."""
        allowed = {"start": "{", "first": '"}', "again": '"', "colon": ":", "after": ",}"}
        if self._next == "begin":
            self._begin_value(letter)
        elif letter not in allowed[self._next]:
            self.failed = True
        elif letter == "}":
            self.complete, self.failed = True, not self.name
        elif letter == '"':
            self._next, self._text, self._value = "key", [letter], JsonValue()
            self._value.add(letter)
        else:
            self._next = {"{": "first", ":": "begin", ",": "again"}[letter]

    def _in_key(self, letter: str) -> None:
        self._text.append(letter)
        self._value.add(letter)
        if self._value.complete:
            key = _loads("".join(self._text))
            self._key, self._next = str(key), "colon"

    def _begin_value(self, letter: str) -> None:
        self._next, self._text, self._value = "value", [], JsonValue()
        self._streamed = self._key in ARGUMENTS and letter == "{" and not self._had_arguments
        self._had_arguments = self._had_arguments or self._streamed
        self._in_value(letter)

    def _in_value(self, letter: str) -> None:
        inside = self._value.add(letter)
        if inside:
            (self._arguments if self._streamed else self._text).append(letter)
        if self._value.complete:
            self._next = "after"
            self._end_value()
            if not inside:
                self._end_bare(letter)

    def _end_bare(self, letter: str) -> None:
        """The character that ended a number or a word is the next one between."""
        if letter not in BLANKS:
            self._between(letter)

    def _end_value(self) -> None:
        if self._streamed:
            return
        value = _loads("".join(self._text))
        if self._key == "name" and not self.name:
            known = isinstance(value, str) and value and (self._names is None or value in self._names)
            self.name, self.failed = (str(value), False) if known else ("", True)
        elif self._key in ARGUMENTS and not self._had_arguments and value is not None:
            self._had_arguments = True
            self._arguments.append(value if isinstance(value, str) else "".join(self._text))


def _loads(text: str) -> object:
    """A JSON value; None where it is none."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
