"""Drafts that come from other processes, as a proposer of the engine.

    prefilling  opens a sequence at a drafter while its prompt is read, so that both read it at the same time
    propose     opens the sequences without a drafter, tells what was committed, reads the offers that lie
                there; where there are none it waits until a deadline, if that is expected to pay
                (``waiting.py``)
    observe     tells the drafters at once what a pass has committed: they draft on while the next is planned;
                where their drafts are not used they are only asked now and then (``waiting.py``)
    forget      closes

Drafting takes the engine no time, so the proposer is ``free``: the policy keeps the drafts that pay. Waiting
is charged to the policy's budget like any proposer's time, so that all of it together stays within the same
bound. One answer is waited for once: where it does not come in time, passes are plain until it does.

    ahead       = K + tokens that are committed in the meantime       K tokens of a draft, by the cost model

so K grows with the measured turnaround: a drafter that is far away drafts further ahead.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Condition

from pydantic import ValidationError

from attar.runtime.completion import Completion
from attar.runtime.speculate.draft import Draft, kind_of
from attar.runtime.speculate.policy import MIN_SPEEDUP, DraftPolicy
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest
from attar.runtime.speculate.target import PAST_END
from attar.serving.services.drafter import Drafter, DrafterPool
from attar.serving.services.messages import MOST_AHEAD, Close, Commit, DraftSampling, Offer, Open
from attar.serving.services.offers import Offers, Outcome
from attar.serving.services.waiting import DraftDemand, best_depth, best_wait

MOST_WAIT = 0.05  # seconds; requests that arrive meanwhile wait too
FIRST_AHEAD = 8
REFRESH = 16  # passes between two choices of ``ahead``
LEARN = 1 / 4  # weight of a wait in ``usable``, of a sequence in ``idle_share``
RECOVER = 32  # passes with ready drafts until a wait in vain is forgotten


@dataclass(eq=False)
class OfferedSequence:
    """A sequence that a drafter drafts for.

    Attributes:
        request: its number in messages.
        length: tokens that were sent to the drafter.
        opened: tokens that it was opened with.
        demand: how far the drafter is to draft.
        base: tokens with which the pass began that runs; 0: it is in none.
        judged: tokens of which it is known whether they were guessed.
        unanswered: when the first commit was sent that no offer answers yet; None: there is none.
        answers: the length of that commit; an offer on it or a later one answers.
    """

    request: int
    drafter: Drafter
    length: int
    opened: int
    answers: int
    demand: DraftDemand
    base: int = 0
    judged: int = 0
    unanswered: float | None = None


@dataclass
class OfferCounts:
    """Counts since the start: offers by outcome, passes that waited, waits in vain, seconds waited."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    waits: int = 0
    late: int = 0
    waited: float = 0.0


class OfferPolicy(DraftPolicy):
    """The policy of drafts that other processes make: an empty pass does not pause the drafters, which draft
    on while it runs. Waiting is bounded by the budget alone."""

    def passes_to_skip(self, batch: int, proposing: float, is_lookup: bool = True) -> int:
        """Passes to skip: none while the budget lasts."""
        return super().passes_to_skip(batch, 0.0)


class OfferProposer:
    """Proposes what drafters offer.

    Args:
        policy: the speculator's: its times and acceptance rates are read.
        most: tokens of a draft at most.
        clock: seconds.

    Attributes:
        ahead: tokens that drafters may offer beyond the committed ones.
        idle_share: share of the sequences, the last ones most, for which drafters rested at their end.
        usable: share of the waits after which there was a draft: an offer on an older length may disagree.
        pool: the drafters, which need ``offer`` before they can be made; set it before the first pass.
    """

    is_free_of_compute, samples_from_q, needs_full_tree = True, False, False

    def __init__(
        self,
        policy: DraftPolicy,
        vocabulary: int,
        *,
        most: int = 16,
        name: str = "draft",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy, self.most, self.name, self.clock = policy, most, name, clock
        self.pool: DrafterPool | None = None
        self.offers, self.counts = Offers(vocabulary), OfferCounts()
        self.ahead, self.usable, self.idle_share = FIRST_AHEAD, 1.0, 0.0
        self._changed = Condition()
        self._numbers = itertools.count(1)
        self._sequences: dict[int, OfferedSequence] = {}
        self._by_request: dict[int, OfferedSequence] = {}
        self._unsendable: set[int] = set()  # beyond the bounds of messages: decoded plainly
        self._passes = 0

    def offer(self, offer: Offer) -> Outcome:
        """An offer arrived; called from the network's thread. Says what became of it."""
        with self._changed:
            outcome = self.offers.put(offer)
            self.counts.outcomes[outcome] += 1
            sequence = self._by_request.get(offer.request)
            if outcome == "wrong" or sequence is None:
                return outcome
            if (
                sequence.unanswered is not None and offer.base >= sequence.answers
            ):  # a stale offer answers, too
                if sequence.answers > sequence.opened:  # the first answer takes a prefill
                    sequence.drafter.turnaround.note(self.clock() - sequence.unanswered)
                sequence.unanswered = None
            self._changed.notify()
        return outcome

    def prefilling(self, requests: Sequence[DraftRequest]) -> None:
        """Open sequences whose prompts are read now."""
        with self._changed:
            for request in requests:
                sequence = self._sequences.get(request.sequence)
                if sequence is None or not sequence.drafter.ready:
                    self._close(request.sequence)
                    self._open(request, len(requests))

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """The offers as chains; None where there is none."""
        self._refresh(len(requests))
        with self._changed:
            for request in requests:
                self._follow(request, len(requests))
            if any(request.most > 0 for request in requests):
                self._wait(requests)
            return [self._draft(request) for request in requests]

    def observe(self, feedback: Sequence[DraftFeedback]) -> None:
        """Tell the drafters what a pass has committed."""
        with self._changed:
            for verified in feedback:
                sequence = self._sequences.get(verified.sequence)
                if sequence is None or not sequence.base:
                    continue
                tokens = [token for token in verified.tokens if token != PAST_END]
                base, sequence.base = sequence.base, 0
                if verified.draft is not None:
                    sequence.drafter.record_verdict(len(verified.draft), len(verified.path))
                    sequence.judged = base + len(tokens)
                    if verified.path:
                        sequence.demand.used(sequence.judged)
                    else:
                        sequence.demand.answered(base, useful=False)
                if sequence.length == base:  # else all is sent with the next question
                    self._commit(sequence, tokens)

    def forget(self, sequence: int) -> None:
        """A sequence ended."""
        with self._changed:
            self._close(sequence)
            self._unsendable.discard(sequence)

    def check(self) -> None:
        """Raises AssertionError naming what is wrong."""
        open_requests = len(self._sequences), len(self._by_request), len(self.offers)
        assert len({*open_requests}) == 1, f"sequences, requests and offers are {open_requests}"

    def _follow(self, request: DraftRequest, batch: int) -> None:
        """Open a sequence that no ready drafter serves; send a drafter the tokens that it lacks."""
        sequence = self._sequences.get(request.sequence)
        if sequence is not None and not sequence.drafter.ready:
            self._close(request.sequence)
            sequence = None
        if sequence is None:
            sequence = self._open(request, batch)
        else:
            self._judge(sequence, request, batch)
            if sequence.length < len(request.tokens):
                self._commit(sequence, request.tokens[sequence.length :])
        if sequence is not None:
            sequence.base = len(request.tokens)

    def _judge(self, sequence: OfferedSequence, request: DraftRequest, batch: int) -> None:
        """Learn from a guess that no pass has run: what was committed says whether it was right."""
        base, guess = self.offers.guess(sequence.request)
        if not sequence.judged <= base < len(request.tokens):
            return
        sequence.judged, right = base + 1, request.tokens[base] == guess
        self.policy.acceptance.note(request.sequence, kind_of(0, 1), right)
        sequence.demand.answered(len(request.tokens), right and self._pays(request.sequence, batch))

    def _pays(self, sequence: int, batch: int) -> bool:
        """Whether a draft that is there is worth its verification; -1: in a sequence of which nothing is
        known."""
        return not self.policy.latency.known or self.policy.speedup(sequence, self.most, batch) >= MIN_SPEEDUP

    def _open(self, request: DraftRequest, batch: int) -> OfferedSequence | None:
        """Open a sequence at a drafter; None where none is ready, or no message can hold the request."""
        rules = request.rules
        assert isinstance(rules, Completion), "drafters need the parameters of a request"
        if (
            self.pool is None
            or request.sequence in self._unsendable
            or not self.pool.ready_for(rules.request)
        ):
            return None
        number, tokens = next(self._numbers), tuple(request.tokens)
        length, salt, trace = len(tokens), request.salt[:256], rules.request[:256]
        demand = DraftDemand(length, self.idle_share < 0.5 and self._pays(-1, batch))
        ahead = demand.ahead(length, self.ahead)
        try:
            opening = Open(number, tokens, sampling_of(rules, length), ahead, salt, trace)
        except ValidationError:
            self._unsendable.add(request.sequence)
            return None
        drafter = self.pool.choose(opening)
        if drafter is None:
            return None
        sequence = OfferedSequence(number, drafter, length, length, length, demand)
        sequence.unanswered = self.clock() if ahead else None
        self._sequences[request.sequence] = self._by_request[number] = sequence
        self.offers.open(number, length)
        drafter.send(opening)
        return sequence

    def _commit(self, sequence: OfferedSequence, tokens: Sequence[int]) -> None:
        """Send what was committed, unless the drafter rests."""
        length = sequence.length + len(tokens)
        self.offers.commit(sequence.request, length)
        ahead = sequence.demand.ahead(length, self.ahead)
        if not ahead and sequence.unanswered is None:
            return
        base, sequence.length = sequence.length, length
        if sequence.unanswered is None:
            sequence.unanswered, sequence.answers = self.clock(), length
        sequence.drafter.send(Commit(sequence.request, base, tuple(tokens), max(ahead, 1)))

    def _close(self, sequence: int) -> None:
        offered = self._sequences.pop(sequence, None)
        if offered is not None:
            self.idle_share += (bool(offered.demand.gap) - self.idle_share) * LEARN
            del self._by_request[offered.request]
            self.offers.close(offered.request)
            offered.drafter.send(Close(offered.request))

    def _draft(self, request: DraftRequest) -> Draft | None:
        sequence = self._sequences.get(request.sequence)
        if sequence is None or request.most <= 0:
            return None
        tokens = self.offers.draft(sequence.request, request.tokens)[: min(request.most, self.most)]
        return Draft.chain(tokens) if tokens else None

    def _wait(self, requests: Sequence[DraftRequest]) -> None:
        """Wait for offers that are under way, where that pays."""
        now = self.clock()
        ready, expected = 0, []
        for request in requests:
            sequence = self._sequences.get(request.sequence)
            if sequence is None or request.most <= 0:
                continue
            if self.offers.draft(sequence.request, request.tokens):
                ready += 1
            elif (
                sequence.unanswered is not None
                and (seconds := sequence.drafter.turnaround.expected) is not None
            ):
                expected.append((sequence.unanswered + seconds - now, sequence, request.tokens))
        expected = sorted((row for row in expected if 0 < row[0] <= MOST_WAIT), key=lambda row: row[0])
        if ready:
            self.usable += (1 - self.usable) / RECOVER
        rates = self.policy.acceptance.rates(-1, 0, self.most) if expected else []
        rates = [self.usable * rate for rate in rates[:1]] + rates[1:]
        seconds = best_wait([wait for wait, _, _ in expected], ready, len(requests), rates, self.policy)
        if not seconds:
            return
        awaited = [sequence for wait, sequence, _ in expected if wait <= seconds]
        until = now + seconds
        while (
            any(sequence.unanswered is not None for sequence in awaited)
            and (left := until - self.clock()) > 0
        ):
            self._changed.wait(left)
        self.counts.waits += 1
        self.counts.waited += self.clock() - now
        self.counts.late += any(sequence.unanswered is not None for sequence in awaited)
        usable = sum(
            bool(self.offers.draft(sequence.request, tokens))
            for _, sequence, tokens in expected[: len(awaited)]
        )
        self.usable += (usable / len(awaited) - self.usable) * LEARN

    def _refresh(self, batch: int) -> None:
        """Choose how far drafters should guess."""
        self._passes += 1
        if self._passes % REFRESH != 1 or not self.policy.latency.known:
            return
        depth, gain = best_depth(self.policy, batch, self.most)
        turnarounds = [sequence.drafter.turnaround.mean for sequence in self._sequences.values()]
        known = [seconds for seconds in turnarounds if seconds is not None]
        passed = float(FIRST_AHEAD)
        if known:
            passed = max(known) / self.policy.latency.target(batch, batch * (1 + depth)) * (1 + gain)
        self.ahead = min(depth + math.ceil(min(passed, MOST_AHEAD)), MOST_AHEAD)


def sampling_of(completion: Completion, length: int) -> DraftSampling:
    """What a drafter must know of a completion with so many tokens in all."""
    params = completion.params
    return DraftSampling(
        completion.seed % 2**64,
        completion.sample,
        length - completion.count,
        temperature=float(params.temperature),
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(params.biases)[:4096],
        min_tokens=params.min_tokens,
        ends=completion.ends[:4096],
    )
