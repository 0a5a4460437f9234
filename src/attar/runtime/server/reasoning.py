"""Reasoning apart from the answer: what a model writes between its tags before it answers."""

from __future__ import annotations

from attar.errors import SettingsError
from attar.runtime.server.tool_calls.marks import split_at_mark
from attar.runtime.server.tool_calls.parts import AnswerPiece

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


class ReasoningSplitter:
    """Divides one answer into reasoning and the rest, piece by piece; blanks around the reasoning are left
    out.

    Args:
        tags: opening, closing.
        begun: the prompt ends with the opening tag.
    """

    def __init__(self, tags: tuple[str, str], begun: bool = False) -> None:
        self._open, self._close = tags
        self._state = "reasoning" if begun else "lead"
        self._held = ""
        self._shown = False  # some of the reasoning was returned

    @property
    def inside(self) -> bool:
        """Whether the closing tag is still to come."""
        return self._state == "reasoning"

    def add(self, piece: str) -> list[AnswerPiece]:
        """What the next piece brings."""
        text, self._held = self._held + piece, ""
        pieces: list[AnswerPiece] = []
        if self._state == "lead":
            text = self._read_lead(text)
        if self._state == "reasoning":
            text = self._read_reasoning(text, pieces)
        if self._state == "gap":
            text = text.lstrip()
            self._state = "text" if text else "gap"
        if self._state == "text" and text:
            pieces.append(AnswerPiece(text))
        return pieces

    def finish(self) -> list[AnswerPiece]:
        """What was held back, when the answer has ended."""
        held, self._held = self._held, ""
        if self._state == "reasoning":
            held = held.rstrip()
            return [AnswerPiece(reasoning=held)] if held else []
        return [AnswerPiece(held)] if held else []

    def _read_lead(self, text: str) -> str:
        """Blanks, and the opening tag or none."""
        behind = text.lstrip()
        if behind.startswith(self._open):
            self._state = "reasoning"
            return behind[len(self._open) :]
        if self._open.startswith(behind):
            self._held = text
            return ""
        self._state = "text"
        return text

    def _read_reasoning(self, text: str, pieces: list[AnswerPiece]) -> str:
        before, mark, after = split_at_mark(text, (self._close,))
        if not self._shown:
            before = before.lstrip()
        shown = before.rstrip()
        if shown:
            self._shown = True
            pieces.append(AnswerPiece(reasoning=shown))
        if mark:
            self._state = "gap"
            return after
        self._held = before[len(shown) :] + after
        return ""
