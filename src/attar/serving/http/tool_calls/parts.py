"""What an answer consists of: text, reasoning and calls of tools, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CallPiece:
    """A piece of a call.

    Attributes:
        index: of the call in the answer, from 0.
        name: of the tool, whole, with the first piece of a call; else empty.
        arguments: the next characters of its JSON.
    """

    index: int
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True)
class AnswerPiece:
    """A piece of an answer, of one kind."""

    text: str = ""
    reasoning: str = ""
    call: CallPiece | None = None


@dataclass
class WholeCall:
    """A call of a tool, with its arguments in JSON as the model wrote them."""

    name: str
    arguments: str = ""


@dataclass
class WholeAnswer:
    """An answer in its kinds."""

    text: str = ""
    reasoning: str = ""
    calls: list[WholeCall] = field(default_factory=list)


def join_pieces(pieces: Iterable[AnswerPiece]) -> WholeAnswer:
    """The answer that the pieces are of."""
    answer, texts, reasoning = WholeAnswer(), list[str](), list[str]()
    arguments: list[list[str]] = []
    for piece in pieces:
        texts.append(piece.text)
        reasoning.append(piece.reasoning)
        if piece.call is not None:
            if piece.call.index == len(answer.calls):
                answer.calls.append(WholeCall(piece.call.name))
                arguments.append([])
            arguments[piece.call.index].append(piece.call.arguments)
    for call, written in zip(answer.calls, arguments, strict=True):
        call.arguments = "".join(written)
    answer.text, answer.reasoning = "".join(texts), "".join(reasoning)
    return answer
