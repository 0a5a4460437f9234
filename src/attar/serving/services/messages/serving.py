"""Messages between a coordinator and a target: requests, their events, and the target's load."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from attar.errors import AttarError, DataError, GrammarError, SettingsError, UsageError
from attar.runtime.admission import BusyError
from attar.runtime.results import Event, FinishReason, TokenLogprob, Usage
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.speculative_pass import SpeculationCounts
from attar.serving.services.messages.wire import MOST_BYTES, STRICT, Count, ShortText, WireTokens


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
