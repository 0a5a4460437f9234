"""A request while it runs: its texts, its times, and what was scored of its prompt."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from attar.runtime.completion import Completion
from attar.runtime.results import Event, TokenLogprob, Usage
from attar.runtime.sampling.detokenize import Decode
from attar.runtime.sampling.grammar import Matcher
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sequence import Request


@dataclass(eq=False)
class RequestState:
    """What the engine keeps of a request.

    Args:
        id: its name.
        prompt: token ids.
        params: how its tokens are chosen.
        texts: its n texts.
        arrival: seconds on the engine's clock.
        cached: tokens of the prompt found in the prefix cache when it first ran.
        started: when its first step began; None before.
        first: when it got its first token; None before.
        scored: log-probabilities of the prompt's tokens, where asked for.
        drafted: tokens that were proposed and verified.
        accepted: of these.
    """

    id: str
    prompt: Sequence[int]
    params: SamplingParams
    texts: list[Completion]
    arrival: float
    cached: int = 0
    started: float | None = None
    first: float | None = None
    scored: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    drafted: int = 0
    accepted: int = 0
    _told: bool = False

    @property
    def finished(self) -> bool:
        """Whether all its texts have ended."""
        return all(text.finished for text in self.texts)

    def start(self, now: float, cached: int) -> None:
        """A step with its tokens begins; only the first counts."""
        if self.started is None:
            self.started, self.cached = now, cached

    def stamped(self, event: Event, now: float) -> Event:
        """The event with what only the job knows: the prompt's scores with the first, usage with the last."""
        if event.token_ids and self.first is None:
            self.first = now
        if self.params.prompt_logprobs is not None and event.sample == 0 and not self._told:
            self._told = True
            event = replace(event, prompt_logprobs=tuple(self.scored))
        return replace(event, usage=self._usage(now)) if self.finished else event

    def _usage(self, now: float) -> Usage:
        return Usage(
            prompt_tokens=len(self.prompt),
            completion_tokens=sum(text.count for text in self.texts),
            cached_tokens=self.cached,
            queue_s=None if self.started is None else self.started - self.arrival,
            first_token_s=None if self.first is None else self.first - self.arrival,
            total_s=now - self.arrival,
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
        )


def make_completions(
    request: Request,
    params: SamplingParams,
    *,
    ends: Sequence[int],
    limit: int,
    decode: Decode | None,
    matcher: Matcher | None,
) -> list[Completion]:
    """The n texts of a request, each at the beginning of the grammar; the arguments are those of Text."""
    seed = secrets.randbits(64) if params.seed is None else params.seed
    return [
        Completion(
            request.id,
            index,
            request.prompt,
            params,
            seed=seed,
            ends=ends,
            limit=limit,
            decode=decode,
            matcher=matcher and matcher.copy(),
        )
        for index in range(params.n)
    ]
