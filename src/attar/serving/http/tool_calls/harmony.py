"""Harmony, the form of gpt-oss (https://github.com/openai/harmony, docs/format.md): an answer is messages in
channels.

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary<|message|>text before calls<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>text<|return|>

The prompt ends with ``<|start|>assistant``; the recipient may stand before the channel. Marks are special
tokens. An answer without a header, as one that a grammar holds, is text.
"""

from __future__ import annotations

import re
from typing import Any

from attar.serving.http.tool_calls.json_value import BLANKS
from attar.serving.http.tool_calls.marks import split_at_mark
from attar.serving.http.tool_calls.parser import CallParser
from attar.serving.http.tool_calls.parts import AnswerPiece

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
LEADS = (START, CHANNEL, MESSAGE, "to=")  # what an answer may begin with
FUNCTIONS = "functions."
MAX_HEADER = 1000  # characters
_TO, _CHANNEL = re.compile(r"\bto=([^\s<]+)"), re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


class HarmonyCalls(CallParser):
    """Messages to functions are calls, those of ``final`` and of ``commentary`` are text, and all others,
    to tools that nobody gave among them, are reasoning."""

    def __init__(self, tools: dict[str, Any]) -> None:
        super().__init__(tools)
        self._held, self._state, self._kind = "", "lead", "text"
        self._begun = False  # of the message that is read, some was put
        self._between: dict[str, str] = {}  # kind to what separates its messages
        self._after = ""  # blanks of the reasoning that wait for more of it

    @property
    def reasons(self) -> bool:
        return self._state == "body" and self._kind == "reasoning"

    def read(self, piece: str) -> None:
        states = {
            "lead": self._read_lead,
            "header": self._read_header,
            "body": self._read_body,
            "after": self._read_after,
        }
        text, self._held = self._held + piece, ""
        while text:
            text = states[self._state](text)

    def end(self) -> None:
        held, self._held = self._held, ""
        if self._state == "lead":
            self.put_text(held)
        elif self._state == "body":
            self._put(held)
            self._close()

    def _read_lead(self, text: str) -> str:
        """The first characters: a header, or no message at all."""
        behind = text.lstrip(BLANKS)
        if behind.startswith(LEADS):
            self._state = "header"
            return behind
        if any(lead.startswith(behind) for lead in LEADS):
            self._held = text
            return ""
        self._state, self._kind = "body", "text"
        return text

    def _read_header(self, text: str) -> str:
        header, mark, after = text.partition(MESSAGE)
        if not mark and len(text) <= MAX_HEADER:
            self._held = text
            return ""
        channel, to = _CHANNEL.search(header), _TO.search(header)
        self._state, self._begun = "body", False
        if to is not None and to[1].startswith(FUNCTIONS) and self.tools:
            self._kind = "call"
            self.put_call(to[1].removeprefix(FUNCTIONS))
        elif to is None and (channel is None or channel[1] in ("final", "commentary")):
            self._kind = "text"
        else:
            self._kind = "reasoning"
        return after if mark else text

    def _read_body(self, text: str) -> str:
        before, mark, after = split_at_mark(text, (*ENDS, START))
        self._put(before)
        if not mark:
            self._held = after
            return ""
        self._close()
        self._state = "header" if mark == START else "after"
        return after

    def _read_after(self, text: str) -> str:
        """Nothing but blanks until the next message begins."""
        behind = text.lstrip(BLANKS)
        if behind.startswith(START):
            self._state = "header"
            return behind[len(START) :]
        if START.startswith(behind):
            self._held = behind
            return ""
        self._state, self._kind, self._begun = "body", "text", False
        return text

    def _put(self, text: str) -> None:
        """Content of the message that is read."""
        if not self._begun:
            text = text if self._kind == "text" and not self._between else text.lstrip(BLANKS)
        if not text:
            return
        if not self._begun:
            text = self._between.get(self._kind, "") + text
        self._begun = True
        if self._kind == "call":
            self.put_arguments(text)
        elif self._kind == "text":
            self.put_text(text)
        else:
            text = self._after + text
            shown = text.rstrip(BLANKS)
            self._after = text[len(shown) :]
            if shown:
                self._pieces.append(AnswerPiece(reasoning=shown))

    def _close(self) -> None:
        """The message ends."""
        if self._kind == "call" and not self._begun:
            self.put_arguments("{}")
        elif self._begun:
            self._between[self._kind] = "" if self._kind == "call" else "\n"
        self._after = ""
