"""The first message of a stream, on both sides: who speaks, and whether the two fit."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from attar.serving.services.messages.wire import STRICT, VERSION, Count, ProtocolError, ShortText


@dataclass(frozen=True, config=STRICT)
class Hello:
    """The first message on both sides.

    Args:
        version: of the protocol.
        role: draft, target or coordinator.
        name: of the model.
        tokenizer: digest of its tokens (:func:`tokenizer_digest`); a draft is refused for another one.
        vocabulary: token ids are in [0, vocabulary).
        context: longest sequence; None: no limit.
    """

    version: Count
    role: Literal["draft", "target", "coordinator"]
    name: ShortText
    tokenizer: ShortText
    vocabulary: Count
    context: Count | None = None
    kind: Literal["hello"] = "hello"


def check_hello(message: object, role: str, local: Hello) -> Hello:
    """The other side's first message.

    Args:
        role: it must have.

    Raises:
        ProtocolError: names what is wrong, and the mend.
    """
    if not isinstance(message, Hello):
        raise ProtocolError("the first message of a stream is not hello")
    if message.version != VERSION:
        raise ProtocolError(
            f"{message.name} speaks protocol {message.version}, this one {VERSION}",
            hint="run the same version of attar on both sides",
        )
    if message.role != role:
        raise ProtocolError(f"{message.name} has the role {message.role}, not {role}")
    if message.tokenizer != local.tokenizer:
        raise ProtocolError(
            f"{message.name} and {local.name} have different tokenizers",
            hint="draft with a model of the same family",
        )
    return message
