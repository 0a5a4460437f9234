"""A request while it runs, and each of its n completions.

    row(), key()     what sampling the next token needs
    append(tokens)   sampled tokens → an Event, with fewer tokens where the completion ends before the last
    finish(reason)   the completion ends for a reason outside it

Free of the model and of the cache: the engine passes logits in and events out.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from attar.errors import AttarError
from attar.runtime.results import Event, FinishReason, TokenLogprob, Usage
from attar.runtime.sampling.detokenize import Decode, Detokenizer, StopFinder
from attar.runtime.sampling.grammar import Matcher
from attar.runtime.sampling.mask_budget import SLOW_S
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.penalties import TokenHistory
from attar.runtime.sampling.sample import noise_key
from attar.runtime.sampling.warp import SamplingRow
from attar.runtime.sequence import Request


class Completion:
    """One of a request's n completions.

    Args:
        sample: index of the completion in [0, n).
        seed: the request's; a random one where the parameters have none.
        limit: most tokens: what max_tokens and the context allow.
        decode: tokens to text; None without a tokenizer: events have no text.
        matcher: state of the grammar, of this completion alone; None: no grammar.
    """

    def __init__(
        self,
        request: str,
        sample: int,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        ends: Sequence[int] = (),
        limit: int,
        decode: Decode | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        self.request, self.sample, self.params = request, sample, params
        self.seed, self.limit = seed, limit
        self.ends = tuple(dict.fromkeys((*(() if params.ignore_eos else ends), *params.stop_ids)))
        self.count = 0  # tokens generated
        self.finished = False
        self._start = len(prompt)
        self._history = TokenHistory(prompt) if params.penalises else None
        self._detokenizer = Detokenizer(decode, prompt) if decode else None
        self._stops = StopFinder(params.stop, params.include_stop)
        self._matcher = matcher

    def row(self, drafted: Sequence[int] = ()) -> SamplingRow:
        """What decides the next token besides its logits, or the token after some draft tokens."""
        history = self._history.after(drafted) if self._history and drafted else self._history
        early = self.count + len(drafted) < self.params.min_tokens
        matcher = self._matcher.after(drafted) if self._matcher and drafted else self._matcher
        allowed = None if matcher is None else matcher.allowed(self.ends)
        return SamplingRow(self.params, history, self.ends if early else (), allowed)

    def key(self, ahead: int = 0) -> int:
        """Noise key of the next token, or of the token ``ahead`` positions later."""
        return noise_key(self.seed, self.sample, self._start + self.count + ahead)

    def ends_within(self, drafted: Sequence[int]) -> bool:
        """Whether an end token or the end of the grammar is among draft tokens."""
        if any(token in self.ends for token in drafted):
            return True
        return self._matcher is not None and bool(drafted) and self._matcher.after(drafted).complete

    @property
    def guided(self) -> bool:
        """Whether a grammar decides what may be sampled."""
        return self._matcher is not None

    @property
    def drafts(self) -> bool:
        """Whether drafts pay: a mask for each of their prefixes costs more than it gives where masks are
        slow."""
        return self._matcher is None or self._matcher.last_s < SLOW_S

    def mask_s(self) -> float:
        """Seconds of the processor that the request's masks took since the last call."""
        if self._matcher is None:
            return 0.0
        seconds, self._matcher.time.seconds = self._matcher.time.seconds, 0.0
        return seconds

    def reason_of_grammar(self) -> FinishReason | None:
        """Computes the mask of the next token; why the completion ends with the last one, if it does."""
        if self._matcher and self._matcher.complete:
            return "stop"
        return "length" if self.count >= self.limit else None

    def append(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob] = (),
        proposers: Sequence[str] = (),
        *,
        defer: bool = False,
    ) -> Event:
        """One or more tokens were sampled; those after the end of the completion are dropped.

        Args:
            logprobs: one for each token, or none.
            proposers: the same.
            defer: the grammar is asked later whether it ends with the last token
                (:meth:`reason_of_grammar`).
        """
        assert not self.finished, "the completion has ended"
        text, reason, match, used = "", None, None, 0
        for token in tokens:
            used += 1
            text += self._text_of(token)
            reason, match = self._finish_reason(token)
            if reason is None and not (defer and used == len(tokens)):
                reason = self.reason_of_grammar()
            if reason:
                break
        if reason and self._stops.match is None:
            text += self._held_text()
            if match is None and self._stops.match is not None:
                reason, match = "stop", self._stops.match
        self.finished = reason is not None
        return Event(
            self.request,
            self.sample,
            text,
            tuple(tokens[:used]),
            tuple(logprobs[:used]),
            reason,
            match,
            proposers=tuple(proposers[:used]),
        )

    def finish(self, reason: FinishReason, failure: Exception | None = None) -> Event:
        """The completion ends for a reason outside it; with an error where text that was held back fails to
        decode.

        Args:
            failure: the exception where the reason is "error".
        """
        assert not self.finished, "the completion has ended"
        self.finished, text = True, ""
        try:
            text = self._held_text()
        except Exception as decode_failure:
            reason, failure = "error", failure or decode_failure
        error = None if failure is None else _message(failure)
        return Event(self.request, self.sample, text, finish_reason=reason, error=error, failure=failure)

    def _text_of(self, token: int) -> str:
        """Counts a token; the text that can be shown now."""
        self.count += 1
        if self._history:
            self._history.add(token)
        if self._matcher and token not in self.ends:
            self._matcher.consume(token)
        shown = self.params.include_stop and token in self.params.stop_ids
        if self._detokenizer is None or (token in self.ends and not shown):
            return ""
        piece = self._detokenizer.add(token)
        return piece if self.count < self.params.min_tokens else self._stops.add(piece)

    def _finish_reason(self, token: int) -> tuple[FinishReason | None, str | int | None]:
        """Whether an end token or a stop string ends the completion with this token, and which."""
        if token in self.ends:
            return "stop", token
        if self._stops.match is not None:
            return "stop", self._stops.match
        return None, None

    def _held_text(self) -> str:
        """Text that was held back: half a character, or a possible stop string."""
        piece = self._detokenizer.flush() if self._detokenizer else ""
        text = self._stops.add(piece)
        return text if self._stops.match is not None else text + self._stops.flush()


@dataclass(eq=False)
class RequestState:
    """What the engine keeps of a request until its last completion ends.

    Args:
        cached_tokens: prompt tokens that were cached when it first ran.
        started: seconds on the engine's clock of its first step; None before.
        first_token: the same of its first token.
        prompt_logprobs: of the prompt's tokens, filled where asked for; None for the first.
        observe: see :data:`attar.runtime.engine.PromptObserver`.
    """

    request: Request
    params: SamplingParams
    completions: list[Completion]
    cached_tokens: int = 0
    started: float | None = None
    first_token: float | None = None
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    drafted: int = 0
    accepted: int = 0
    lossy: bool = False
    observe: Callable[[int, Any], None] | None = None
    _prompt_logprobs_sent: bool = False

    @staticmethod
    def of(
        request: Request,
        params: SamplingParams,
        *,
        ends: Sequence[int],
        limit: int,
        decode: Decode | None,
        matcher: Matcher | None,
    ) -> RequestState:
        """With n new completions; the arguments are those of :class:`Completion`."""
        seed = secrets.randbits(64) if params.seed is None else params.seed
        completions = [
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
        return RequestState(request, params, completions)

    @property
    def guided(self) -> bool:
        """Whether it has a grammar."""
        return self.completions[0].guided

    @property
    def finished(self) -> bool:
        """Whether all completions have ended."""
        return all(completion.finished for completion in self.completions)

    def start(self, now: float, cached_tokens: int) -> None:
        """A step with its tokens begins; only the first counts."""
        if self.started is None:
            self.started, self.cached_tokens = now, cached_tokens

    def complete(self, event: Event, now: float) -> Event:
        """The event with what concerns the whole request: the prompt's log-probabilities with the first
        event, usage with the last."""
        if event.token_ids and self.first_token is None:
            self.first_token = now
        wanted = self.params.prompt_logprobs is not None and not self._prompt_logprobs_sent
        if wanted and event.sample == 0:
            self._prompt_logprobs_sent = True
            event = replace(event, prompt_logprobs=tuple(self.prompt_logprobs))
        return replace(event, usage=self._usage(now)) if self.finished else event

    def _usage(self, now: float) -> Usage:
        arrival = self.request.arrival
        return Usage(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=sum(completion.count for completion in self.completions),
            cached_tokens=self.cached_tokens,
            queue_s=None if self.started is None else self.started - arrival,
            first_token_s=None if self.first_token is None else self.first_token - arrival,
            total_s=now - arrival,
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
            lossy=self.lossy,
        )


def _message(failure: Exception) -> str:
    """An exception as text; with its class where it is not one of attar's own."""
    return str(failure) if isinstance(failure, AttarError) else f"{type(failure).__name__}: {failure}"
