"""Messages between a verifier and a drafter, also where a coordinator hands them on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from attar.runtime.sampling.params import SamplingParams
from attar.serving.services.messages.wire import (
    MOST_AHEAD,
    STRICT,
    Count,
    Penalty,
    Share,
    ShortText,
    WireToken,
    WireTokens,
)


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
