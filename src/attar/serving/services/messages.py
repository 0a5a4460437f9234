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
from dataclasses import fields
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from attar.errors import AttarError, DataError, GrammarError, SettingsError, UsageError
from attar.runtime.admission import BusyError
from attar.runtime.results import Event, FinishReason, TokenLogprob, Usage
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.speculative_pass import SpeculationCounts

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


@dataclass(frozen=True, config=STRICT)
class DraftSampling:
    """How the tokens of a request are sampled, as far as a drafter can follow: grammars and stop strings stay
    with the target.

    Args:
        prompt: tokens of the prompt.
        ends: tokens that end the completion; they are banned before ``min_tokens`` generated ones.
    """

    seed: Annotated[int, Field(ge=0, lt=2**64)]
    sample: Count
    prompt: Count
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    top_p: Share = 1.0
    top_k: Count = 0
    min_p: Share = 0.0
    repetition_penalty: Penalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[tuple[tuple[WireToken, Penalty], ...], Field(max_length=4096)] = ()
    min_tokens: Count = 0
    ends: Annotated[tuple[WireToken, ...], Field(max_length=4096)] = ()

    def params(self) -> SamplingParams:
        """As parameters of a request.

        Raises:
            SettingsError: values that are not allowed.
        """
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            max_tokens=None,
            min_tokens=self.min_tokens,
        )


@dataclass(frozen=True, config=STRICT)
class Open:
    """A request begins to be drafted for.

    Args:
        request: its number on this stream, never used again.
        tokens: all so far: the committed length is their number.
        ahead: tokens that may be offered beyond the committed ones.
        salt: the tenant; what is kept of a request is used for its salt only.
        trace: the id of the client's request, for logs; ``traceparent`` names its span.
    """

    request: Count
    tokens: WireTokens
    sampling: DraftSampling
    ahead: Annotated[int, Field(ge=0, le=MOST_AHEAD)]
    salt: ShortText = ""
    trace: ShortText = ""
    traceparent: ShortText = ""
    kind: Literal["open"] = "open"


@dataclass(frozen=True, config=STRICT)
class Commit:
    """The tokens after the first ``base`` of a request are decided."""

    request: Count
    base: Count
    tokens: WireTokens
    ahead: Annotated[int, Field(ge=0, le=MOST_AHEAD)]
    kind: Literal["commit"] = "commit"


@dataclass(frozen=True, config=STRICT)
class Close:
    """A request has ended, or another drafter serves it."""

    request: Count
    kind: Literal["close"] = "close"


@dataclass(frozen=True, config=STRICT)
class Offer:
    """A guess: the tokens after the first ``base`` of a request."""

    request: Count
    base: Count
    tokens: Annotated[tuple[WireToken, ...], Field(min_length=1, max_length=MOST_AHEAD)]
    kind: Literal["offer"] = "offer"


@dataclass(frozen=True, config=STRICT)
class Ping:
    """Asks for a pong from the thread that drafts."""

    number: Count
    kind: Literal["ping"] = "ping"


@dataclass(frozen=True, config=STRICT)
class Pong:
    """The answer to a ping."""

    number: Count
    kind: Literal["pong"] = "pong"


@dataclass(frozen=True, config=STRICT)
class Submit:
    """A request for the target's engine; ``id`` is the trace id in the logs of all services, ``traceparent``
    names the span that it is a part of."""

    id: ShortText
    prompt: WireTokens
    params: SamplingParams
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    deadline_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    salt: ShortText = ""
    traceparent: ShortText = ""
    kind: Literal["submit"] = "submit"


@dataclass(frozen=True, config=STRICT)
class Cancel:
    """What is left of a request ends."""

    id: ShortText
    kind: Literal["cancel"] = "cancel"


@dataclass(frozen=True, config=STRICT)
class EventMessage:
    """An event of the engine; ``fault``: the request itself is at fault where the reason is "error"."""

    request: ShortText
    sample: Count
    text: str = ""
    token_ids: WireTokens = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    usage: Usage | None = None
    proposers: tuple[str, ...] = ()
    embedding: Annotated[tuple[float, ...], Field(max_length=1 << 16)] | None = None
    fault: bool = False
    kind: Literal["event"] = "event"

    @classmethod
    def of(cls, event: Event) -> EventMessage:
        """An event of this process."""
        values = {name: getattr(event, name) for name in _EVENT_FIELDS}
        embedding = None if event.embedding is None else tuple(event.embedding.tolist())
        fault = isinstance(event.failure, UsageError | DataError)
        return cls(**values, embedding=embedding, fault=fault)

    def event(self) -> Event:
        """As an event of this process."""
        values = {name: getattr(self, name) for name in _EVENT_FIELDS}
        failure = DataError(self.error or "the request failed") if self.fault else None
        embedding = None if self.embedding is None else np.array(self.embedding, dtype=np.float32)
        return Event(**values, embedding=embedding, failure=failure)


_EVENT_FIELDS = tuple(field.name for field in fields(Event) if field.name not in ("embedding", "failure"))


@dataclass(frozen=True, config=STRICT)
class Refusal:
    """The engine takes no such request: the error, by its kind."""

    request: ShortText
    error: Literal["settings", "grammar", "data", "busy", "failed"]
    message: str
    field: ShortText = ""
    kind: Literal["refusal"] = "refusal"

    @classmethod
    def of(cls, request: str, failure: Exception) -> Refusal:
        """An error of this process; what is no user's error keeps its message to itself."""
        message = failure.message if isinstance(failure, AttarError) else type(failure).__name__
        name = failure.field if isinstance(failure, SettingsError) else ""
        kinds = {"grammar": GrammarError, "settings": SettingsError, "data": DataError, "busy": BusyError}
        error: Any = next((name for name, kind in kinds.items() if isinstance(failure, kind)), "failed")
        return cls(request, error, message, name[:256])

    def failure(self) -> Exception:
        """As an error of this process."""
        if self.error in ("settings", "grammar"):
            kind = SettingsError if self.error == "settings" else GrammarError
            failure = kind(self.field, None, "")
            failure.message, failure.args = self.message, (self.message,)
            return failure
        return {"data": DataError, "busy": BusyError}.get(self.error, AttarError)(self.message)


def too_large(what: str, hint: str) -> DataError:
    """The error of a request where what it needs does not fit into a frame."""
    return DataError(
        f"the {what} is larger than {MOST_BYTES >> 20} MiB, the most between two services", hint=hint
    )


@dataclass(frozen=True, config=STRICT)
class TargetLoad:
    """The load of the target, a few times a second; the fields are those of its metrics."""

    running: Count
    waiting: Count
    free: Count
    cache_usage: Annotated[float, Field(ge=0, le=1)]
    blocks: Annotated[dict[ShortText, Count], Field(max_length=64)]
    prefix_queries: Count
    prefix_hits: Count
    preemptions: Count
    speculation: SpeculationCounts | None = None
    kind: Literal["load"] = "load"


@dataclass(frozen=True, config=STRICT)
class Drafters:
    """Draft services that are ready: with none, the target opens nothing."""

    ready: Count
    kind: Literal["drafters"] = "drafters"


@dataclass(frozen=True, config=STRICT)
class DraftVerdict:
    """How many drafted tokens of a request a pass verified, and how many it accepted."""

    request: Count
    drafted: Count
    accepted: Count
    kind: Literal["verdict"] = "verdict"


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
