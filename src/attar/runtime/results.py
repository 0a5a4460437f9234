"""The output of a request: pure data, free of torch.

An :class:`Event` is what one step added to one completion; a :class:`Result` is the whole output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "cancelled", "deadline", "capacity", "error"]
"""stop: an end token, a stop id or a stop string; length: max_tokens, or the context is full; cancelled: by
the caller; deadline: it passed; capacity: this sequence alone fills the KV cache; error: the request failed,
others went on."""


TARGET = "target"
"""The proposer of a token that was not drafted: the model itself."""


@dataclass(frozen=True)
class TokenLogprob:
    """The probability of a token under the model itself, before penalties, temperature and cuts.

    Attributes:
        logprob: natural logarithm of its probability.
        top: (id, log-probability) of the most likely tokens, in descending order.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    """Tokens and times of a request.

    Attributes:
        prompt_tokens: of the prompt, the cached ones included.
        completion_tokens: generated, over all completions.
        cached_tokens: of the prompt, served by the prefix cache.
        queue_s: seconds until its first step; None without one.
        first_token_s: seconds until the first token; None without one.
        total_s: seconds until its last completion ended.
        drafted_tokens: draft tokens that were verified; 0 without speculation.
        accepted_tokens: of these.
        lossy: whether typical acceptance decided about them: the completions are not the model's own.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    queue_s: float | None = None
    first_token_s: float | None = None
    total_s: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    lossy: bool = False

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Event:
    """What one step added to one completion.

    Attributes:
        sample: index of the completion in [0, n).
        text: the piece that is certain now; the pieces joined are the completion's text.
        token_ids: tokens generated since the last event; their text may come later (half a character, a
            possible stop string).
        logprobs: one for each of the tokens where asked for.
        proposers: who proposed each of the tokens where asked for: a proposer's name, or TARGET.
        finish_reason: None until the last event of this completion.
        stop_reason: the stop string or token id that ended it.
        error: what went wrong where the reason is ``error``.
        failure: the same as an exception; a UsageError or DataError is the caller's fault.
        prompt_logprobs: with the first event of sample 0 where asked for: one for each token of the
            prompt, None for the first, which follows nothing.
        usage: with the last event of a request.
        embedding: float32 (H,), the prompt's pooled hidden states, with the first event where asked for.
    """

    request: str
    sample: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    usage: Usage | None = None
    proposers: tuple[str, ...] = ()
    embedding: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)
    failure: Exception | None = field(default=None, compare=False, repr=False)

    @property
    def finished(self) -> bool:
        """Whether this is the completion's last event."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class Sample:
    """One completion of a result.

    Attributes:
        text: cut before a stop string; without special tokens unless asked for.
        token_ids: all that was generated, an end token and a stop string's tokens included.
        finish_reason: see :data:`FinishReason`.
        stop_reason: the stop string or token id that ended it.
        logprobs: one for each token where asked for, else None.
        proposers: one for each token where asked for, else none.
        error: what went wrong where the reason is ``error``.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None
    proposers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """The completions of a prompt; the properties are those of the first (often only) one."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.samples[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.samples[0].logprobs

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def gather(events: Sequence[Event], *, logprobs: bool = False) -> Sample:
    """One completion from all its events, in order; the last one is finished.

    Args:
        logprobs: whether they were asked for: an empty completion then has an empty tuple, and not None.
    """
    last = events[-1]
    assert last.finish_reason is not None, "the completion has not ended"
    return Sample(
        text="".join(event.text for event in events),
        token_ids=tuple(token for event in events for token in event.token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=tuple(logprob for event in events for logprob in event.logprobs) if logprobs else None,
        error=last.error,
        proposers=tuple(proposer for event in events for proposer in event.proposers),
    )


def gather_result(
    prompt: str | None, prompt_ids: Sequence[int], events: Sequence[Event], logprobs: bool
) -> Result:
    """The result of a prompt from all its events, in order."""
    by_sample: dict[int, list[Event]] = {}
    for event in events:
        by_sample.setdefault(event.sample, []).append(event)
    samples = tuple(gather(by_sample[index], logprobs=logprobs) for index in sorted(by_sample))
    usage = next(event.usage for event in events if event.usage is not None)
    scored = next((event.prompt_logprobs for event in events if event.prompt_logprobs is not None), None)
    return Result(prompt, tuple(prompt_ids), samples, usage, scored)
