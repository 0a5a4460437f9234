"""One text while it is generated: what decides its next token, and when it ends.

    row(), key()    what the draw of the next token needs
    take(tokens)    tokens that were drawn → the news (an Event), or less of them where the text ends first
    end(reason)     it ends for another reason

Free of a model and of the cache: the engine brings logits and takes events.
"""

from __future__ import annotations

from collections.abc import Sequence

from attar.errors import AttarError
from attar.runtime.results import Event, FinishReason, TokenLogprob
from attar.runtime.sampling.detokenize import Decode, Detokenizer
from attar.runtime.sampling.grammar import Matcher
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.penalties import TokenHistory
from attar.runtime.sampling.sample import noise_key
from attar.runtime.sampling.stop import StopFinder
from attar.runtime.sampling.warp import SamplingRow


class Completion:
    """A sample of a request.

    Args:
        request: the request's id.
        sample: which of its n texts.
        prompt: its tokens.
        params: how tokens are chosen.
        seed: the request's, drawn where its parameters have none.
        ends: the model's end tokens.
        limit: tokens at most: what max_tokens and the context leave.
        decode: tokens to text; None where there is no tokenizer, and then no text.
        matcher: of its grammar, for this text alone; None: the text is free.
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
        self._words = Detokenizer(decode, prompt) if decode else None
        self._stops = StopFinder(params.stop)
        self._matcher = matcher

    def row(self, drafted: Sequence[int] = ()) -> SamplingRow:
        """What decides the next token, or the one after tokens that are only drafted."""
        history = self._history.after(drafted) if self._history and drafted else self._history
        early = self.count + len(drafted) < self.params.min_tokens
        matcher = self._matcher.after(drafted) if self._matcher and drafted else self._matcher
        allowed = None if matcher is None else matcher.allowed(self.ends)
        return SamplingRow(self.params, history, self.ends if early else (), allowed)

    def key(self, ahead: int = 0) -> int:
        """The noise of the next token, or of the one so many places later."""
        return noise_key(self.seed, self.sample, self._start + self.count + ahead)

    def over(self, drafted: Sequence[int]) -> bool:
        """Whether the text ends inside tokens that are only drafted: with an end token or its grammar."""
        if any(token in self.ends for token in drafted):
            return True
        return self._matcher is not None and bool(drafted) and self._matcher.after(drafted).complete

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> Event:
        """Tokens were drawn, one or more. What comes behind the end of the text is dropped.

        Args:
            logprobs: one for each token, or none.
        """
        assert not self.finished, "the text has ended"
        shown, reason, why, used = "", None, None, 0
        for token in tokens:
            used += 1
            shown += self._shown(token)
            reason, why = self._judged(token)
            if reason:
                break
        if reason and self._stops.found is None:
            shown += self._rest()
            if why is None and self._stops.found is not None:
                reason, why = "stop", self._stops.found
        self.finished = reason is not None
        return Event(
            self.request, self.sample, shown, tuple(tokens[:used]), tuple(logprobs[:used]), reason, why
        )

    def end(self, reason: FinishReason, failure: Exception | None = None) -> Event:
        """The text ends here, for a reason that is not in it; where even what was held back cannot be shown,
        with an error.

        Args:
            failure: what went wrong where the reason is "error".
        """
        assert not self.finished, "the text has ended"
        self.finished, held = True, ""
        try:
            held = self._rest()
        except Exception as broken:
            reason, failure = "error", failure or broken
        error = None if failure is None else _described(failure)
        return Event(self.request, self.sample, held, finish_reason=reason, error=error, failure=failure)

    def _shown(self, token: int) -> str:
        """Count a token; the text that can be shown with it."""
        self.count += 1
        if self._history:
            self._history.add(token)
        if self._matcher and token not in self.ends:
            self._matcher.take(token)
        if self._words is None or token in self.ends:
            return ""
        piece = self._words.add(token)
        return piece if self.count < self.params.min_tokens else self._stops.add(piece)

    def _judged(self, token: int) -> tuple[FinishReason | None, str | int | None]:
        """Whether the text ends with this token, and which end token or stop string is in it."""
        if token in self.ends:
            return "stop", token
        if self._stops.found is not None:
            return "stop", self._stops.found
        if self._matcher and self._matcher.complete:
            return "stop", None
        return ("length", None) if self.count >= self.limit else (None, None)

    def _rest(self) -> str:
        """What was held back."""
        piece = self._words.rest() if self._words else ""
        shown = self._stops.add(piece)
        return shown if self._stops.found is not None else shown + self._stops.rest()


def _described(failure: Exception) -> str:
    """An exception in one string: of another than ours, its class too."""
    return str(failure) if isinstance(failure, AttarError) else f"{type(failure).__name__}: {failure}"
