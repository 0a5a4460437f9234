"""Types of fields with their bounds, and the errors of services."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from attar.errors import AttarError

VERSION = 2  # of the protocol
MOST_AHEAD = 64  # tokens of an offer
MOST_TOKENS = 1 << 20  # of a request
MOST_MESSAGES, MOST_BYTES = 4096, 16 << 20  # of a frame

STRICT = ConfigDict(extra="forbid", strict=True)
Count = Annotated[int, Field(ge=0, lt=2**53)]
WireToken = Annotated[int, Field(ge=0, lt=2**31)]
WireTokens = Annotated[tuple[WireToken, ...], Field(max_length=MOST_TOKENS)]
ShortText = Annotated[str, Field(max_length=256)]
Penalty = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class ProtocolError(AttarError):
    """Another service sends what the protocol does not allow."""


class UnavailableError(AttarError):
    """Another service cannot be reached now."""


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
