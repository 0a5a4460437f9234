"""One request at a drafter: the committed tokens, and the drafter's guess of the tokens that follow. Pure.

    text     committed tokens, then the guess; the drafter drafts on after all of it
    commit   the guess goes on behind the decided tokens where it agrees with them, else it is dropped

So drafting never waits for verification: as long as the guess is right, the next offer is ready before it is
asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.penalties import TokenHistory
from attar.runtime.sampling.sample import noise_key
from attar.runtime.sampling.warp import SamplingRow
from attar.serving.services.messages import Commit, DraftSampling, Offer, Open
from attar.serving.services.trace import RequestSpan


class DraftSession:
    """A request that is drafted for.

    Args:
        opening: its first message.
        number: among all sessions of the service.

    Attributes:
        text: committed tokens and guess.
        length: committed tokens.
        ahead: tokens of the guess that are wanted.
        read: tokens that the proposer has run.
        done: nothing can follow the guess.
        span: of the drafting.

    Raises:
        SettingsError: sampling parameters that are not allowed.
    """

    def __init__(self, opening: Open, number: int) -> None:
        self.request, self.number, self.salt, self.trace = (
            opening.request,
            number,
            opening.salt,
            opening.trace,
        )
        self.text, self.length, self.ahead = list(opening.tokens), len(opening.tokens), opening.ahead
        self.sampling, self._params = opening.sampling, opening.sampling.params()
        self.read, self.done, self.offered = 0, False, 0
        self.span = RequestSpan()

    @property
    def wanted(self) -> int:
        """Tokens of the guess that are missing."""
        return 0 if self.done else max(self.ahead - (len(self.text) - self.length), 0)

    @property
    def answer_known(self) -> bool:
        """Whether the guess is as long as it may be, so that an answer takes no drafting."""
        return not self.wanted and len(self.text) > self.length

    def commit(self, message: Commit) -> None:
        """Tokens are decided. A message on another length than the committed one is ignored."""
        if message.base != self.length:
            return
        decided = self.length + len(message.tokens)
        if self.text[self.length : decided] != list(message.tokens):
            self.text[self.length :] = message.tokens
            self.read = min(self.read, self.length)
        self.length, self.ahead, self.done = decided, message.ahead, False

    def extend(self, tokens: Sequence[int]) -> None:
        """The guess goes on; with no tokens it is done."""
        self.text += tokens
        self.done = self.done or not tokens

    def offer(self) -> Offer:
        """The whole guess."""
        self.offered += 1
        return Offer(self.request, self.length, tuple(self.text[self.length :]))

    def rules(self) -> GuessRules:
        """The rules of the token after the guess."""
        return GuessRules(self.sampling, self._params, self.text)


class GuessRules:
    """How the tokens after a text are drawn: with the target's noise, as ``completion.Completion`` does."""

    def __init__(self, sampling: DraftSampling, params: SamplingParams, text: Sequence[int]) -> None:
        self._sampling, self._params, self._length = sampling, params, len(text)
        self._history = None
        if params.penalises:
            self._history = TokenHistory(text[: sampling.prompt], text[sampling.prompt :])

    def row(self, drafted: Sequence[int] = ()) -> SamplingRow:
        """The warps of the token after ``drafted``."""
        history = self._history.after(drafted) if self._history and drafted else self._history
        count = self._length - self._sampling.prompt + len(drafted)
        early = count < self._params.min_tokens
        return SamplingRow(self._params, history, self._sampling.ends if early else ())

    def key(self, ahead: int = 0) -> int:
        """The noise key of the token ``ahead`` positions after the next."""
        return noise_key(self._sampling.seed, self._sampling.sample, self._length + ahead)
