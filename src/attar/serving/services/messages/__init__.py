"""The messages between services: typed, bounded, JSON. A frame of a stream is a list of them.

    to a drafter        hello, open, commit, close, ping
    to the verifier     hello, offer, pong
    to a target         hello, submit, cancel, offer, close, drafters, ping
    to a coordinator    hello, event, refusal, load, open, commit, close, verdict, pong

    open     a request with all its tokens so far, and how they are sampled
    commit   tokens that follow the first ``base``; ``ahead``: tokens that may be offered beyond them
    offer    a guess of the tokens after the first ``base``
    submit   a request for the engine, whose events come back

Every message carries the length on which it stands, so it needs no others to be understood: one that comes
late or twice is known for what it is. Everything is bounded before it is used: the bytes of a frame by the
channel, then lists, texts and numbers here. A frame that breaks a rule ends its stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from attar.errors import SettingsError
from attar.serving.services.messages.drafting import Close, Commit, DraftSampling, Offer, Open, Ping, Pong
from attar.serving.services.messages.serving import (
    Cancel,
    Drafters,
    DraftVerdict,
    EventMessage,
    Refusal,
    Submit,
    TargetLoad,
    too_large,
)
from attar.serving.services.messages.wire import (
    MOST_AHEAD,
    MOST_BYTES,
    MOST_MESSAGES,
    MOST_TOKENS,
    VERSION,
    Hello,
    ProtocolError,
    UnavailableError,
    check_hello,
)

__all__ = [
    "MOST_AHEAD",
    "MOST_BYTES",
    "MOST_MESSAGES",
    "MOST_TOKENS",
    "VERSION",
    "Cancel",
    "Close",
    "Commit",
    "DraftSampling",
    "DraftVerdict",
    "Drafters",
    "EventMessage",
    "Hello",
    "Offer",
    "Open",
    "Ping",
    "Pong",
    "ProtocolError",
    "Refusal",
    "ServiceMessage",
    "Submit",
    "TargetLoad",
    "UnavailableError",
    "check_hello",
    "decode",
    "encode",
    "too_large",
]

ServiceMessage = (
    Hello
    | Open
    | Commit
    | Close
    | Offer
    | Ping
    | Pong
    | Submit
    | Cancel
    | EventMessage
    | Refusal
    | TargetLoad
    | Drafters
    | DraftVerdict
)
_TAGGED = Annotated[ServiceMessage, Field(discriminator="kind")]
_CONSTANTS = ConfigDict(ser_json_inf_nan="constants")
_MESSAGE: TypeAdapter[ServiceMessage] = TypeAdapter(_TAGGED, config=_CONSTANTS)
_FRAME: TypeAdapter[list[ServiceMessage]] = TypeAdapter(
    Annotated[list[_TAGGED], Field(max_length=MOST_MESSAGES)], config=_CONSTANTS
)


def encode(
    messages: Sequence[ServiceMessage],
    most: int = MOST_BYTES,
    instead: Callable[[ServiceMessage], ServiceMessage | None] | None = None,
) -> tuple[list[bytes], list[ServiceMessage]]:
    """Frames with all messages in their order, and the messages that are too large for any frame.

    Args:
        most: bytes of a frame.
        instead: a message that is too large → what stands in its place, None: nothing.
    """
    frames, too_large = list[bytes](), list[ServiceMessage]()
    parts, size = list[bytes](), 1
    for message in messages:
        part = _MESSAGE.dump_json(message)
        if len(part) + 2 > most:
            too_large.append(message)
            other = instead and instead(message)
            if other is None:
                continue
            part = _MESSAGE.dump_json(other)
        if parts and (size + len(part) + 1 > most or len(parts) == MOST_MESSAGES):
            frames.append(b"[" + b",".join(parts) + b"]")
            parts, size = [], 1
        parts.append(part)
        size += len(part) + 1
    return [*frames, *([b"[" + b",".join(parts) + b"]"] if parts else [])], too_large


def decode(frame: bytes) -> list[ServiceMessage]:
    """The messages of a frame.

    Raises:
        ProtocolError: it is not one.
    """
    try:
        return _FRAME.validate_json(frame)
    except ValidationError as error:
        raise ProtocolError(f"a frame is not of protocol {VERSION}: {_first(error)}") from None
    except SettingsError as error:
        raise ProtocolError(f"a frame has parameters that are not allowed: {error.message[:200]}") from None


def _first(error: ValidationError) -> str:
    """The first problem, without the input."""
    problem: Any = error.errors(include_input=False, include_url=False)[0]
    where = ".".join(map(str, problem["loc"]))
    return f"{where}: {problem['msg']}" if where else str(problem["msg"])
