"""From the text of a completion to an answer: reasoning, text and calls of tools, piece by piece."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attar.serving.http.reasoning import ReasoningSplitter, choose_tags
from attar.serving.http.tool_calls import choose_format
from attar.serving.http.tool_calls.call_format import CallFormat, TokenOf, call_grammar
from attar.serving.http.tool_calls.parser import CallParser
from attar.serving.http.tool_calls.parts import AnswerPiece
from attar.serving.http.tool_calls.tool_use import ToolUse

_LETTERS = string.ascii_letters + string.digits
_CALL_ID = 24  # letters of an id where no template counts them


class AnswerParser:
    """Reads one completion.

    Args:
        reasoning: divides the reasoning from it; None: there is none.
        calls: reads calls; None: there are no tools, and the form has no channels.
        most_calls: later ones are left out.
        forced: the answer is calls alone: what is none is a call that was cut.
    """

    def __init__(
        self,
        reasoning: ReasoningSplitter | None,
        calls: CallParser | None,
        most_calls: int | None = None,
        forced: bool = False,
    ) -> None:
        self._reasoning, self._calls, self._most, self._forced = reasoning, calls, most_calls, forced

    @property
    def reasons(self) -> bool:
        """Whether the completion is inside of its reasoning."""
        splitter, calls = self._reasoning, self._calls
        return (splitter is not None and splitter.inside) or (calls is not None and calls.reasons)

    def add(self, piece: str) -> list[AnswerPiece]:
        """What the next piece of text brings."""
        if self._reasoning is None:
            return self._text(piece)
        return self._read(self._reasoning.add(piece))

    def finish(self) -> list[AnswerPiece]:
        """What was held back, when the completion has ended."""
        pieces = [] if self._reasoning is None else self._read(self._reasoning.finish())
        return pieces + ([] if self._calls is None else self._few(self._calls.finish()))

    def _read(self, pieces: Sequence[AnswerPiece]) -> list[AnswerPiece]:
        return [part for piece in pieces for part in ([piece] if piece.reasoning else self._text(piece.text))]

    def _text(self, text: str) -> list[AnswerPiece]:
        if self._calls is None:
            return [AnswerPiece(text)] if text else []
        return self._few(self._calls.add(text))

    def _few(self, pieces: list[AnswerPiece]) -> list[AnswerPiece]:
        most = self._most
        few = [piece for piece in pieces if piece.call is None or most is None or piece.call.index < most]
        return [piece for piece in few if not (self._forced and piece.text)]


@dataclass(frozen=True)
class AnswerForm:
    """How a model's answers are to be read.

    Args:
        calls: the form of its calls.
        tags: around its reasoning; None: it has none.
        knows_effort: its chat template reads ``reasoning_effort``.
    """

    calls: CallFormat
    tags: tuple[str, str] | None
    knows_effort: bool = False

    @classmethod
    def of(cls, template: str, tool_parser: str = "auto", reasoning_parser: str = "auto") -> AnswerForm:
        """From the words of a chat template.

        Raises:
            SettingsError: there is no parser of this name.
        """
        calls, tags = choose_format(tool_parser, template), choose_tags(reasoning_parser, template)
        return cls(calls, tags, "reasoning_effort" in template)

    def parser(self, use: ToolUse | None, prompt_end: str, guided: bool = False) -> AnswerParser:
        """A parser of one completion.

        Args:
            prompt_end: the last characters of the prompt, which may have begun the reasoning.
            guided: a grammar holds the completion, and leaves no room for reasoning.
        """
        forced = use is not None and use.forced
        splitter = calls = None
        if self.tags is not None and not self.calls.channels and not forced and not guided:
            splitter = ReasoningSplitter(self.tags, self.begins_reasoning(prompt_end))
        if use is not None or (self.calls.channels and not guided):
            calls = self.calls.parser({} if use is None else dict(use.parameters))
        return AnswerParser(splitter, calls, None if use is None or use.parallel else 1, forced)

    def begins_reasoning(self, prompt_end: str) -> bool:
        """Whether the prompt ends with the opening tag."""
        return self.tags is not None and prompt_end.rstrip().endswith(self.tags[0])

    @property
    def no_reasoning(self) -> str:
        """What ends the reasoning at once that a prompt has begun."""
        return "" if self.tags is None else f"\n{self.tags[1]}\n\n"

    def constraints(self, use: ToolUse | None, token_of: TokenOf, schema: str | None) -> dict[str, Any]:
        """Sampling parameters that the tools ask for: a grammar where calls are forced, or where the answer
        has a schema; and special tokens in the text, where they mark calls or channels.

        Args:
            use: None: there are no tools.
            schema: of answers without calls; None: any text.
        """
        fields: dict[str, Any] = {}
        marked = use is not None or self.calls.channels
        if marked and any(token_of(mark) is not None for mark in self.calls.marks):
            fields["skip_special_tokens"] = False
        if use is None:
            return fields
        if use.forced or schema is not None:
            answer = None if use.forced else schema
            grammar = call_grammar(
                self.calls, use.parameters, parallel=use.parallel, token_of=token_of, answer=answer
            )
            fields |= {"grammar": grammar, "json_schema": None}
        return fields

    def new_call_id(self) -> str:
        """An id of a call."""
        length = self.calls.id_length
        text = "".join(secrets.choice(_LETTERS) for _ in range(length or _CALL_ID))
        return text if length else f"call_{text}"
