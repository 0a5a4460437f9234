"""What all parsers of tool calls share: pieces in, text and calls out, in their order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

from attar.serving.http.tool_calls.json_value import BLANKS, CallObject, StringRepair
from attar.serving.http.tool_calls.parts import AnswerPiece, CallPiece


class CallParser(ABC):
    """Reads one answer.

    Blanks at the end of a text wait: before calls, and between calls and the first text, they are left out.
    What looks like a call and is none is text. Arguments pass through :class:`StringRepair`.

    Args:
        tools: parameters (a JSON schema) of each tool, by its name.
    """

    def __init__(self, tools: dict[str, Any]) -> None:
        self.tools = tools
        self._calls, self._has_text = 0, False
        self._blanks = ""
        self._repair = StringRepair()  # of the last call's arguments
        self._pieces: list[AnswerPiece] = []

    def add(self, piece: str) -> list[AnswerPiece]:
        """What the next piece of the answer brings."""
        self.read(piece)
        return self._take()

    def finish(self) -> list[AnswerPiece]:
        """What was held back, when the answer has ended."""
        self.end()
        self._end_arguments()
        if not self._calls and self._blanks:
            self._pieces.append(AnswerPiece(self._blanks))
        return self._take()

    @property
    def reasons(self) -> bool:
        """Whether the answer is inside of its reasoning, where the form of calls has it."""
        return False

    @abstractmethod
    def read(self, piece: str) -> None:
        """Read a piece; by each family."""

    @abstractmethod
    def end(self) -> None:
        """Release what is held back; by each family."""

    def put_text(self, text: str) -> None:
        """Text of the answer."""
        text = self._blanks + text
        if self._calls and not self._has_text:
            text = text.lstrip(BLANKS)
        shown = text.rstrip(BLANKS)
        self._blanks = text[len(shown) :]
        if shown:
            self._has_text = True
            self._pieces.append(AnswerPiece(shown))

    def put_call(self, name: str) -> None:
        """A call begins."""
        self._end_arguments()
        self._blanks, self._repair = "", StringRepair()
        self._pieces.append(AnswerPiece(call=CallPiece(self._calls, name)))
        self._calls += 1

    def put_arguments(self, arguments: str) -> None:
        """The next characters of the last call's arguments."""
        arguments = self._repair.add(arguments)
        if arguments:
            self._pieces.append(AnswerPiece(call=CallPiece(self._calls - 1, "", arguments)))

    def _end_arguments(self) -> None:
        held = self._repair.end()
        if held:
            self._pieces.append(AnswerPiece(call=CallPiece(self._calls - 1, "", held)))

    def _take(self) -> list[AnswerPiece]:
        pieces, self._pieces = self._pieces, []
        return pieces


class CallObjects:
    """Reads one object, or a list of them, into a parser's calls.

    Args:
        names: of the tools; None: any name is a call.
        separators: what may be between two objects, besides blanks.

    Attributes:
        begun: a call was read, so nothing before it is text any more.
        raw: the characters of no call, until one has begun.
        ended: the list is closed, or something else than a call follows (then ``unread`` has it).
    """

    def __init__(self, parser: CallParser, names: Collection[str] | None, separators: str = ",;") -> None:
        self.begun, self.raw, self.ended, self.unread = False, "", False, ""
        self._parser, self._names, self._separators = parser, names, separators
        self._object: CallObject | None = None
        self._listed = False

    @property
    def open(self) -> bool:
        """Whether it is inside of an object or a list."""
        return self._object is not None or self._listed

    def read(self, text: str) -> str:
        """Read characters; returns those after the end."""
        start = 0
        while start < len(text) and not self.ended:
            letter = text[start]
            start += 1
            if self._object is None:
                self._between(letter)
            else:
                self._inside(letter)
        self._put_arguments()
        return self.unread + text[start:] if self.ended else ""

    def close(self) -> str:
        """The answer has ended: what is no call is text."""
        raw = "" if self.begun and not self._unnamed else self._raw()
        self._object, self.raw = None, ""
        return raw

    @property
    def _unnamed(self) -> bool:
        return self._object is not None and not self._object.name

    def _raw(self) -> str:
        return self.raw + (self._object.raw if self._object is not None else "")

    def _between(self, letter: str) -> None:
        if letter == "{":
            self._object = CallObject(self._names)
            self._object.add(letter)
            return
        if letter == "[" and not self._listed and not self.begun:
            self._listed = True
        elif letter == "]" and self._listed:
            self.ended = True
        elif letter not in BLANKS and letter not in self._separators:
            self._end_with(letter)
            return
        if not self.begun:
            self.raw += letter

    def _inside(self, letter: str) -> None:
        call = self._object
        assert call is not None
        named = bool(call.name)
        call.add(letter)
        if call.name and not named:
            self.begun, self.raw = True, ""
            self._parser.put_call(call.name)
        if call.failed and not call.name:
            self._object = None
            self._end_with(call.raw)
        elif call.failed or call.complete:
            self._put_arguments()
            self._object = None

    def _put_arguments(self) -> None:
        if self._object is not None and self._object.name:
            self._parser.put_arguments(self._object.take())

    def _end_with(self, text: str) -> None:
        self.ended, self.unread, self.raw = True, self.raw + text, ""
