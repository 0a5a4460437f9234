"""Serves offers: one thread drafts for the requests of all streams, in rounds.

    round     the sessions that want tokens, the least recently served first, in one ``propose``
    prefill   a session with many new tokens reads READ of them, in a separate round between two others,
              so that a long prompt delays the others' offers by one short pass
    offers    of a stream that reads slowly the newest of each request waits, no more

Any proposer drafts that needs no states of the target: a draft model drafts on after its own guess, a free
one (suffix trees) after the committed tokens. Requests, their tokens and what waits are bounded; beyond that,
and with token ids that the model does not have, a request is not drafted for, which only costs its own speed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Protocol

from attar.errors import AttarError
from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.proposer import DraftRequest, Proposer
from attar.serving.services.draft_session import DraftSession
from attar.serving.services.messages import Close, Commit, Offer, Open, Ping, Pong, ServiceMessage
from attar.serving.services.trace import RequestTracer, log_request

ROUND = 4  # tokens of a guess at most, before what was committed is read again
READ = 256  # new tokens of a session that a round takes
FAILURES = 3  # rounds that fail one after the other, after which the service ends

logger = logging.getLogger(__name__)


class OfferStream(Protocol):
    """Where the offers of a verifier's requests go; called from the thread that drafts, never blocks."""

    def offer(self, offer: Offer) -> None: ...

    def pong(self, pong: Pong) -> None: ...


class DraftCounts:
    """Counts since the start, for metrics."""

    def __init__(self) -> None:
        self.opened = self.refused = self.rounds = self.drafted = self.commits = self.stale = 0


class DraftService:
    """Drafts for the requests of many streams.

    Args:
        vocabulary: token ids are in [0, vocabulary).
        sessions: requests at a time at most.
        tokens: of all of them together at most.
        batch: requests of a round at most.
        context: tokens of a request at most; None: no limit.
    """

    def __init__(
        self,
        proposer: Proposer,
        *,
        vocabulary: int,
        sessions: int = 256,
        tokens: int = 1 << 22,
        batch: int = 64,
        context: int | None = None,
    ) -> None:
        self.proposer, self.counts, self.context = proposer, DraftCounts(), context
        self.most_sessions, self.most_tokens, self.batch = sessions, tokens, batch
        self.vocabulary = vocabulary
        self.failure: Exception | None = None
        self.tracer = RequestTracer()
        self._failed = 0  # rounds, one after the other
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._sessions: dict[tuple[OfferStream, int], DraftSession] = {}  # least recently served first
        self._numbers = iter(range(1, 1 << 62))
        self._open, self._reads = True, False
        self._thread = Thread(target=self._work, name="attar-drafts", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Requests that are drafted for."""
        return len(self._sessions)

    @property
    def waiting(self) -> int:
        """Frames that wait; a stream that sends more should be read more slowly."""
        return self._inbox.qsize()

    def receive(self, stream: OfferStream, messages: Sequence[ServiceMessage]) -> None:
        """Messages of a stream arrived, in order."""
        self._inbox.put(lambda: self._handle(stream, messages))

    def leave(self, stream: OfferStream) -> None:
        """A stream ended: its requests are forgotten."""
        self._inbox.put(lambda: self._drop([key for key in self._sessions if key[0] is stream]))

    def close(self) -> None:
        """End the thread."""
        self._open = False
        self._inbox.put(lambda: None)
        self._thread.join()

    def _work(self) -> None:
        try:
            while self._open:
                self._read_inbox(wait=not self._round())
            self._drop(list(self._sessions))
        except Exception as failure:
            logger.error("drafting has stopped: %s", failure, exc_info=failure)
            self.failure = failure

    def _read_inbox(self, wait: bool) -> None:
        try:
            self._inbox.get(block=wait)()
            while True:
                self._inbox.get_nowait()()
        except Empty:
            return

    def _handle(self, stream: OfferStream, messages: Iterable[ServiceMessage]) -> None:
        for message in messages:
            if isinstance(message, Open):
                self._begin(stream, message)
            elif isinstance(message, Ping):
                stream.pong(Pong(message.number))
            elif isinstance(message, Close):
                self._drop([(stream, message.request)])
            elif isinstance(message, Commit):
                session = self._sessions.get((stream, message.request))
                self.counts.commits += 1
                if session is None or session.length != message.base:
                    self.counts.stale += 1
                elif not self._fits(message.tokens):
                    self.counts.refused += 1
                    self._drop([(stream, message.request)])
                else:
                    session.commit(message)
                    if message.ahead and session.answer_known:
                        stream.offer(session.offer())

    def _begin(self, stream: OfferStream, opening: Open) -> None:
        refused = (stream, opening.request) in self._sessions or len(self._sessions) >= self.most_sessions
        sampling = opening.sampling
        ids = (*opening.tokens, *sampling.ends, *(id for id, _ in sampling.logit_bias))
        try:
            session = DraftSession(opening, next(self._numbers))
        except AttarError:
            refused = True
        if refused or not opening.tokens or not self._fits(ids):
            self.counts.refused += 1
            return
        self.counts.opened += 1
        parent = {"traceparent": opening.traceparent}
        session.span = self.tracer.begin("draft", self.proposer.name, headers=parent)
        self._sessions[stream, opening.request] = session

    def _fits(self, tokens: Sequence[int]) -> bool:
        """Whether the model has these tokens, and there is room for them."""
        held = sum(len(session.text) for session in self._sessions.values())
        return max(tokens, default=0) < self.vocabulary and held + len(tokens) <= self.most_tokens

    def _drop(self, keys: Iterable[tuple[OfferStream, int]]) -> None:
        for key in keys:
            session = self._sessions.pop(key, None)
            if session is not None:
                self.proposer.forget(session.number)
                session.span.end(attributes={"attar.offers": session.offered, "attar.tokens": session.length})
                log_request("draft", session.trace, offers=session.offered, tokens=session.length)

    def _round(self) -> bool:
        """Draft for the sessions that want it; false where none does."""
        due = [(key, session) for key, session in self._sessions.items() if self._wants(session)]
        reading = [pair for pair in due if len(pair[1].text) - pair[1].read > READ]
        drafting = [pair for pair in due if len(pair[1].text) - pair[1].read <= READ]
        if reading and (not drafting or self._reads):
            self._reads = False
            self._propose(reading[:1], prefill=True)
        elif drafting:
            self._reads = True
            self._propose(drafting[: self.batch], prefill=False)
        return bool(due)

    def _wants(self, session: DraftSession) -> bool:
        if self.context is not None and len(session.text) >= self.context:
            return False
        if self.proposer.is_free_of_compute:  # its guess is made anew for each committed length
            return session.wanted > 0 and session.read < session.length
        return session.wanted > 0

    def _propose(self, due: Sequence[tuple[tuple[OfferStream, int], DraftSession]], prefill: bool) -> None:
        requests = []
        for key, session in due:
            self._sessions[key] = self._sessions.pop(key)
            if self.proposer.is_free_of_compute:
                del session.text[session.length :]
            tokens = session.text[: session.read + READ] if prefill else session.text
            most = (
                1
                if prefill
                else min(session.wanted, session.ahead if self.proposer.is_free_of_compute else ROUND)
            )
            requests.append(
                DraftRequest(session.number, tokens, most, session.salt, None if prefill else session.rules())
            )
        drafts = self._drafts(requests)
        self.counts.rounds += 1
        for (key, session), request, draft in zip(due, requests, drafts, strict=True):
            session.read = len(request.tokens)
            if prefill:
                continue
            guess = longest_chain(draft)
            self.counts.drafted += len(guess)
            session.extend(guess)
            if guess:
                key[0].offer(session.offer())

    def _drafts(self, requests: Sequence[DraftRequest]) -> Sequence[Draft | None]:
        try:
            drafts = self.proposer.propose(requests)
        except Exception as failure:
            self._failed += 1
            if self._failed >= FAILURES:
                raise
            logger.error("a round of drafts failed: %s", failure, exc_info=failure)
            return [None] * len(requests)
        self._failed = 0
        return drafts


def longest_chain(draft: Draft | None) -> tuple[int, ...]:
    """The tokens of the first deepest node of a draft, with those above it."""
    if draft is None:
        return ()
    depths = draft.depths
    return draft.path_tokens(draft.path(depths.index(max(depths))))
