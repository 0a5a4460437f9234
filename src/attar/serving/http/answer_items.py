"""Pieces of an answer to its items in their order: reasoning, text and calls, each begun, added to and ended.

For APIs whose answers are lists of items: OpenAI's responses, Anthropic's messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from attar.runtime.results import Event
from attar.serving.http.answer import AnswerParser
from attar.serving.http.tool_calls.parts import AnswerPiece


@dataclass
class AnswerItem:
    """Pieces of one kind that follow each other, or one call.

    Attributes:
        index: in the answer, from 0.
        name: of the tool that is called.
        parts: of its text, or of the JSON of a call's arguments.
    """

    kind: Literal["reasoning", "text", "call"]
    index: int
    name: str = ""
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.parts)


@dataclass(frozen=True)
class ItemStep:
    """What happens to an item.

    Attributes:
        text: that is added to it.
    """

    kind: Literal["begin", "add", "end"]
    item: AnswerItem
    text: str = ""


class AnswerItems:
    """The items of one completion.

    Args:
        reasoning: is among them; else it is left out.

    Attributes:
        reasoning_tokens: of the completion so far.
        calls: whether one of the items is a call.
    """

    def __init__(self, parser: AnswerParser, reasoning: bool = True) -> None:
        self._parser, self._reasoning = parser, reasoning
        self._item: AnswerItem | None = None  # that is open
        self._count = self.reasoning_tokens = 0
        self.calls = False

    def read(self, event: Event) -> list[ItemStep]:
        """The steps that an event brings; the last item stays open."""
        pieces = self._parser.add(event.text)
        if self._parser.reasons:
            self.reasoning_tokens += len(event.token_ids)
        if event.finished:
            pieces += self._parser.finish()
        return [step for piece in pieces for step in self._piece(piece)]

    def close(self) -> list[ItemStep]:
        """The end of the item that is open."""
        item, self._item = self._item, None
        return [] if item is None else [ItemStep("end", item)]

    def _piece(self, piece: AnswerPiece) -> list[ItemStep]:
        if piece.call is not None:
            self.calls = True
            begun = self._begin("call", piece.call.name) if piece.call.name else []
            return begun + self._add(piece.call.arguments)
        if piece.reasoning and not self._reasoning:
            return []
        kind: Literal["reasoning", "text"] = "reasoning" if piece.reasoning else "text"
        begun = [] if self._item is not None and self._item.kind == kind else self._begin(kind)
        return begun + self._add(piece.reasoning or piece.text)

    def _begin(self, kind: Literal["reasoning", "text", "call"], name: str = "") -> list[ItemStep]:
        steps = self.close()
        self._item = AnswerItem(kind, self._count, name)
        self._count += 1
        return [*steps, ItemStep("begin", self._item)]

    def _add(self, text: str) -> list[ItemStep]:
        if not text or self._item is None:
            return []
        self._item.parts.append(text)
        return [ItemStep("add", self._item, text)]
