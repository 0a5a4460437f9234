"""The offers of each running request: what of them is a draft now. Pure, and bounded.

    offer (b, x_1..x_k)      after the first b tokens come x_1..x_k
    committed t_1..t_n       b <= n: the offer agrees where x_1..x_(n-b) = t_(b+1)..t_n
    draft                    x_(n-b+1)..x_k of an offer that agrees; else none

So an offer on an older length is still good as far as its first tokens are the decided ones, and one
that is late, doubled or wrong is dropped. The newest base wins, and of one base the longest: messages may
come in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from attar.serving.services.messages import Offer

Outcome = Literal["new", "stale", "unknown", "wrong"]
"""new: kept; stale: nothing of it is new; unknown: of a request that has ended; wrong: no honest drafter
sends it."""


@dataclass
class OpenRequest:
    """A request with its newest offer.

    Attributes:
        length: tokens that are committed.
        base, tokens: of the newest offer that says more than was committed.
        guess: base and first token of the newest offer.
    """

    length: int
    base: int = 0
    tokens: tuple[int, ...] = ()
    guess: tuple[int, int] = (-1, -1)


class Offers:
    """The newest offer of each open request.

    Args:
        vocabulary: token ids are below it.
    """

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self._requests: dict[int, OpenRequest] = {}

    def __len__(self) -> int:
        """Open requests."""
        return len(self._requests)

    def open(self, request: int, length: int) -> None:
        """A request with so many tokens may get offers."""
        self._requests[request] = OpenRequest(length)

    def commit(self, request: int, length: int) -> None:
        """A request has so many tokens."""
        self._requests[request].length = length

    def close(self, request: int) -> None:
        """A request gets no offers any more."""
        self._requests.pop(request, None)

    def put(self, offer: Offer) -> Outcome:
        """Keep an offer if it is the newest."""
        known = self._requests.get(offer.request)
        if known is None:
            return "unknown"
        if offer.base > known.length or max(offer.tokens) >= self.vocabulary:
            return "wrong"
        known.guess = max(known.guess, (offer.base, offer.tokens[0]), key=lambda guess: guess[0])
        newer = (offer.base, len(offer.tokens)) > (known.base, len(known.tokens))
        if not newer or offer.base + len(offer.tokens) <= known.length:
            return "stale"
        known.base, known.tokens = offer.base, offer.tokens
        return "new"

    def guess(self, request: int) -> tuple[int, int]:
        """Length and next token of the newest offer, overtaken or not; -1 where there was none."""
        return self._requests[request].guess

    def draft(self, request: int, tokens: Sequence[int]) -> tuple[int, ...]:
        """The draft after all tokens of a request so far; empty where there is none."""
        known = self._requests[request]
        if not known.tokens:
            return ()
        decided = len(tokens) - known.base
        if tuple(tokens[known.base :]) != known.tokens[:decided]:
            return ()
        return known.tokens[decided:]
