"""Reasoning apart from the answer: what a model writes between its tags before it answers."""

from __future__ import annotations

from attar.errors import SettingsError
from attar.serving.http.tool_calls.marks import possible_start, split_at_mark
from attar.serving.http.tool_calls.parts import AnswerPiece

TAGS = {
    "think": ("<think>", "</think>"),  # Qwen3, DeepSeek-R1, SmolLM3, ...
    "mistral": ("[THINK]", "[/THINK]"),  # Magistral
    "seed": ("<seed:think>", "</seed:think>"),  # Seed-OSS
}
"""Opening and closing tag by name; the first whose closing tag is in a chat template is the model's."""


def choose_tags(name: str, template: str) -> tuple[str, str] | None:
    """The tags by their name; ``auto``: by the words of the chat template; None: the model has none.

    Raises:
        SettingsError: there is no such name.
    """
    if name == "auto":
        return next((tags for tags in TAGS.values() if tags[1] in template), None)
    if name == "none":
        return None
    if name not in TAGS:
        raise SettingsError("reasoning_parser", name, f"auto, none, {', '.join(TAGS)}")
    return TAGS[name]


FENCE = "```"


class ReasoningSplitter:
    """Divides one answer into reasoning and the rest, piece by piece; blanks around the reasoning are left
    out.

    Behind the reasoning a tag is one where it stands alone in its line, outside of code: an opening tag
    begins reasoning again, a closing tag is left out. Without any reasoning, what stands before a closing tag
    was the reasoning; a stream has returned it as text by then.

    Args:
        tags: opening, closing.
        begun: the prompt ends with the opening tag.
    """

    def __init__(self, tags: tuple[str, str], begun: bool = False) -> None:
        self._open, self._close = tags
        self._state = "begun" if begun else "lead"
        self._held = ""
        self._shown = False  # some of this reasoning was returned
        self._between = ""  # what separates it from the one before
        self._answered = self._opened = False  # some of the text was returned; an opening tag is in it
        self._line, self._code = "", False  # of the text: its last line, and whether it is in code

    @property
    def inside(self) -> bool:
        """Whether the closing tag is still to come."""
        return self._state in ("begun", "reasoning")

    def add(self, piece: str) -> list[AnswerPiece]:
        """What the next piece brings."""
        return self._read(piece, final=False)

    def finish(self) -> list[AnswerPiece]:
        """What was held back, when the answer has ended."""
        return self._read("", final=True)

    def _read(self, piece: str, final: bool) -> list[AnswerPiece]:
        text, self._held = self._held + piece, ""
        pieces: list[AnswerPiece] = []
        while text:
            if self._state in ("begun", "lead"):
                text = self._read_lead(text, final)
            elif self._state == "reasoning":
                text = self._read_reasoning(text, final, pieces)
            elif self._state == "gap":
                text = text.lstrip()
                self._state = "text" if text else "gap"
            else:
                text = self._read_text(text, final, pieces)
        self._answered = self._answered or any(piece.text for piece in pieces)
        return pieces

    def _read_lead(self, text: str, final: bool) -> str:
        """Blanks, and the opening tag or none; a prompt that has begun the reasoning may be repeated."""
        behind = text.lstrip()
        if behind.startswith(self._open):
            self._state = "begun" if self._state == "lead" else "reasoning"
            return behind[len(self._open) :]
        if self._open.startswith(behind) and not final:
            self._held = text
            return ""
        self._state = "reasoning" if self._state == "begun" else "text"
        return text

    def _read_reasoning(self, text: str, final: bool, pieces: list[AnswerPiece]) -> str:
        before, mark, after = split_at_mark(text, (self._close,))
        before, after = (before + after, "") if final and not mark else (before, after)
        if not self._shown:
            before = before.lstrip()
        shown = before.rstrip()
        if shown:
            pieces.append(AnswerPiece(reasoning=shown if self._shown else self._between + shown))
            self._shown, self._between = True, "\n"
        if mark:
            self._state, self._shown = "gap", False
            return after
        self._held = "" if final else before[len(shown) :] + after
        return ""

    def _read_text(self, text: str, final: bool, pieces: list[AnswerPiece]) -> str:
        """Lines up to one that is a tag."""
        start = 0  # of the line that is read
        while start < len(text):
            end = text.find("\n", start) + 1 or len(text)
            line = self._line + text[start:end]
            tag = "" if self._code else self._tag(line, final)
            lost = self._lost_opening(text[start:end]) if tag == "" else -1
            if lost >= 0:
                self._end_text(text[: start + lost], self._close, pieces)
                return text[start + lost + len(self._close) :]
            if tag:
                self._end_text(text[:start], tag, pieces)
                return text[end:]
            waits = 0 if final else len(text) - start if tag is None else self._may_begin_tag(text[start:end])
            self._code ^= not self._line.lstrip().startswith(FENCE) and line.lstrip().startswith(FENCE)
            line = line[: len(line) - waits]
            self._line = "" if line.endswith("\n") else line if len(line) < 80 else line[:40] + line[-1]
            start = end
            if waits:
                self._held, text = text[len(text) - waits :], text[: len(text) - waits]
        self._put(text, pieces)
        return ""

    def _lost_opening(self, text: str) -> int:
        """Where a closing tag is in a line, of which no opening tag has come; -1: nowhere."""
        if self._between or self._code:
            return -1
        before, mark, _ = split_at_mark(text, (self._open, self._close))
        self._opened = self._opened or mark == self._open
        quoted = (self._line + before)[-1:] in ("`", "'", '"')
        return len(before) if mark == self._close and not self._opened and not quoted else -1

    def _may_begin_tag(self, text: str) -> int:
        """Characters at the end of a line that may begin a tag which ends the text."""
        return 0 if self._between or self._code else possible_start(text, (self._open, self._close))

    def _tag(self, line: str, final: bool) -> str | None:
        """The tag that is alone in a line; empty: none is; None: it may become one."""
        bare = line.strip()
        tags = (self._open, self._close)
        if bare in tags and (line.endswith("\n") or final) and not self._line:
            return bare
        waits = bare and not final and not self._line and not line.endswith("\n")
        return None if waits and any(tag.startswith(bare) for tag in tags) else ""

    def _end_text(self, text: str, tag: str, pieces: list[AnswerPiece]) -> None:
        """The text before a tag: reasoning, where it is the first of an answer and the tag closes."""
        lost_opening = tag == self._close and not (self._answered or self._between)
        if lost_opening and text.strip():
            self._between = "\n"
            pieces.append(AnswerPiece(reasoning=text.strip()))
        else:
            self._put(text, pieces)
        self._state, self._line = "reasoning" if tag == self._open else "gap", ""

    @staticmethod
    def _put(text: str, pieces: list[AnswerPiece]) -> None:
        if text:
            pieces.append(AnswerPiece(text))
