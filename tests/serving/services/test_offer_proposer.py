"""An engine with a drafter in another thread: the same tokens, whatever the drafter does."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from attar.runtime.admission import Limits
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.latency import Latency
from attar.runtime.speculate.policy import DraftPolicy
from attar.serving.services.messages import Close, Commit, Offer, Open
from attar.serving.services.offer_proposer import sampling_of
from attar.serving.services.waiting import MOST_GAP, best_depth, best_wait
from tests.runtime.fake_runner import FakeRunner
from tests.runtime.speculate.test_engine import asked, same
from tests.runtime.test_engine import alone, engine
from tests.serving.http.test_live import until
from tests.serving.services.local import Garbled, LocalDrafter, Waiting, drafting, offered

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, seed=0)


class Slow(FakeRunner):
    """Every pass takes a while, as a model's."""

    def __init__(self, *values, **options):
        super().__init__(*values, **options)
        self.go = threading.Event()  # a pass waits for it for a while
        self.go.set()

    def run(self, step):
        time.sleep(0.002)
        self.go.wait(0.5)
        return super().run(step)


def served(service, requests, damage=lambda offer: [offer], policy=None, blocks=64):
    """Runs them with offers; every answer must be the one of plain decoding. The speculator."""
    drafter = offered(service, damage, policy)
    try:
        same(engine(Slow(blocks=blocks), limits=Limits(step_tokens=64), speculator=drafter), requests)
    finally:
        service.close()
    drafter.proposer.check()
    assert not drafter.proposer._sequences and service.running == 0
    service.proposer.check()
    return drafter


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", [None, Waiting], ids=["at once", "waiting"])
def test_random_requests_with_the_target_as_its_own_drafter(policy):
    """Greedy and sampled, penalties, grammar-free: with the target's noise nearly every draft is accepted."""
    requests = asked(10, seed=3)
    drafter = served(drafting(), requests, policy=policy and policy())
    counts = drafter.counts
    assert counts.drafts > 0 and counts.accepted >= 0.9 * counts.drafted


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
def test_offers_that_are_late_doubled_reordered_and_wrong(seed):
    served(drafting(), asked(8, seed=10 + seed), Garbled(seed), policy=Waiting())


def test_sequences_that_are_preempted_are_opened_again():
    requests = [([number, 2, 3], replace(GREEDY, max_tokens=60)) for number in range(6)]
    drafter = served(drafting(), requests, policy=Waiting(), blocks=40)
    opened = [one for one in drafter.proposer.pool.drafter.sent if isinstance(one, Open)]
    assert len(opened) > 6


def test_messages_tell_each_token_once():
    drafter = served(drafting(), [([5, 6, 7], GREEDY), ([9], GREEDY)], policy=Waiting())
    sent = drafter.proposer.pool.drafter.sent
    for opening in [one for one in sent if isinstance(one, Open)]:
        own = [one for one in sent if one.request == opening.request]
        assert isinstance(own[0], Open) and isinstance(own[-1], Close)
        length = len(opening.tokens)
        for commit in own[1:-1]:
            assert isinstance(commit, Commit) and commit.base == length and commit.tokens
            length += len(commit.tokens)


def test_a_prompt_is_opened_while_it_is_read():
    """So the first pass that decodes has a draft; a request of one token needs none."""
    service = drafting()
    drafter = offered(service, policy=Waiting())
    proposer = drafter.proposer
    running = engine(Slow(), limits=Limits(step_tokens=16, chunk=16, sequences=4), speculator=drafter)
    running.add([1, 2, 3], replace(GREEDY, max_tokens=1))
    running.step()
    assert not proposer.pool.drafter.sent
    running.add(list(range(40)), GREEDY, id="long")
    running.step()
    [opening] = proposer.pool.drafter.sent
    assert isinstance(opening, Open) and opening.tokens == tuple(range(40))
    until(lambda: proposer.offers.draft(opening.request, opening.tokens))
    while not drafter.counts.drafts:
        assert len(running._requests["long"].completions) == 1
        assert running._requests["long"].completions[0].count <= 1, "it has decoded without a draft"
        running.step()
    assert drafter.counts.accepted > 0
    running.cancel("long")
    running.step()
    service.close()
    proposer.check()
    assert service.running == 0


def test_passes_without_a_proposal_after_the_prompt_are_told_whole():
    """What they decoded is sent with the next proposal, from its first token on."""
    service, policy = drafting(), Waiting()
    drafter = offered(service, policy=policy)
    running = engine(Slow(), speculator=drafter)
    running.add([1, 2, 3], GREEDY, id="a")
    running.step()
    policy.open = False
    running.step()
    running.step()
    policy.open = True
    while drafter.counts.drafts < 3:
        running.step()
    opening, *commits = [one for one in drafter.proposer.pool.drafter.sent if not isinstance(one, Close)]
    told = [*opening.tokens, *(token for one in commits for token in one.tokens)]
    assert opening.tokens == (1, 2, 3)
    assert told[3:] == alone([1, 2, 3], GREEDY)[: len(told) - 3]
    running.cancel("a")
    running.step()
    service.close()


def test_a_request_that_no_message_holds_is_decoded_plainly_and_the_others_go_on(monkeypatch):
    """Such as one of more than a million tokens."""

    def beyond(completion, length):
        sampling = sampling_of(completion, length)
        return sampling if completion.request == "1" else replace(sampling, seed=-1)

    monkeypatch.setattr("attar.serving.services.offer_proposer.sampling_of", beyond)
    drafter = served(drafting(), [([3, 1], GREEDY), ([5, 6], GREEDY)], policy=Waiting())
    assert drafter.failure is None and drafter.counts.accepted > 0 and not drafter.proposer._unsendable
    opened = [one for one in drafter.proposer.pool.drafter.sent if isinstance(one, Open)]
    assert [one.tokens[:2] for one in opened] == [(5, 6)]


def test_without_a_drafter_a_pass_builds_no_message(monkeypatch):
    service = drafting()
    drafter = offered(service, policy=Waiting())
    drafter.proposer.pool.drafter.ready = False
    monkeypatch.setattr("attar.serving.services.offer_proposer.Open", None)
    same(engine(Slow(), speculator=drafter), [([1, 2], GREEDY)])
    service.close()
    assert drafter.failure is None


def test_a_drafter_that_goes_away_is_left_and_comes_back():
    service = drafting()
    drafter = offered(service, policy=Waiting())
    running = engine(Slow(), speculator=drafter)
    pool = drafter.proposer.pool
    running.add([1, 2, 3], replace(GREEDY, max_tokens=100))
    while drafter.counts.accepted < 10:
        running.step()
    pool.drafter.ready = False
    running.step()
    running.step()
    assert not drafter.proposer._sequences
    drafts = drafter.counts.drafts
    running.step()
    assert drafter.counts.drafts == drafts
    pool.drafter = LocalDrafter(service, drafter.proposer.offer)
    while drafter.counts.drafts < drafts + 3:
        running.step()
    running.cancel("0")
    service.close()
    assert service.running == 0


def test_a_late_answer_is_waited_for_once():
    """The drafter answers a few times and then never: one wait runs into its deadline, then all is plain."""
    offers: list[Offer] = []

    def silent(offer: Offer):
        offers.append(offer)
        return [offer] if len(offers) < 4 else []

    service = drafting()
    drafter = offered(service, silent, Waiting())
    drafter.proposer.pool.drafter.turnaround.note(0.02)
    same(engine(Slow(), speculator=drafter), [([1, 2], replace(GREEDY, max_tokens=80))])
    service.close()
    assert drafter.proposer.counts.late <= 4 and drafter.counts.drafts > 0  # each answer is late once at most


def test_waits_after_which_no_draft_is_usable_become_rare():
    """Every offer disagrees with what was committed meanwhile; other sequences have better ones."""

    def other(offer: Offer):
        return [Offer(offer.request, max(offer.base - 1, 0), tuple(token ^ 1 for token in offer.tokens))]

    service = drafting()
    drafter = offered(service, other, Waiting())
    drafter.proposer.policy.latency = Latency({1: 0.002, 64: 0.002})
    drafter.proposer.policy.acceptance.note = lambda sequence, kind, accepted: None
    same(engine(Slow(), speculator=drafter), [([1, 2], replace(GREEDY, max_tokens=120))])
    service.close()
    waits = drafter.proposer.counts.waits
    assert waits < 10 and (drafter.proposer.usable < 0.8 or not waits)


class Wrong(FakeRunner):
    """Guesses otherwise than the target, until it is ``right``."""

    right = False

    def _logits(self, slots):
        return super()._logits(slots) if self.right else -super()._logits(slots)


def test_a_drafter_of_no_use_is_asked_now_and_then_until_it_is_right():
    runner = Wrong(blocks=256)
    service = drafting(runner)
    drafter = offered(service, policy=Waiting())
    running = engine(Slow(blocks=128), speculator=drafter)
    params, tokens = replace(GREEDY, max_tokens=190), []
    running.add([1, 2, 3], params)

    def until_length(length):
        while len(tokens) < length:
            tokens.extend(token for event in running.step() for token in event.token_ids)
        return service.counts.drafted, len(drafter.proposer.pool.drafter.sent)

    drafted, sent = until_length(30)
    drafted_since, sent_since = until_length(120)
    assert drafted_since - drafted < 15 and sent_since - sent < 15
    [sequence] = drafter.proposer._sequences.values()
    assert sequence.demand.gap == MOST_GAP and drafter.counts.accepted == 0
    runner.right = True
    until_length(params.max_tokens)
    assert drafter.counts.accepted > 0, "it was not asked again"
    assert tokens == alone([1, 2, 3], params)
    service.close()


def test_after_requests_without_use_new_ones_begin_with_questions():
    runner = Wrong(blocks=512)
    service = drafting(runner)
    drafter = offered(service, policy=Waiting())
    running = engine(Slow(blocks=128), speculator=drafter)
    for number in range(5):
        same(running, [([number, 3], GREEDY)])
    openings = [one for one in drafter.proposer.pool.drafter.sent if isinstance(one, Open)]
    assert openings[0].ahead > 1 and openings[-1].ahead == 0
    runner.right = True
    same(running, [([7, 8], replace(GREEDY, max_tokens=100))])
    service.close()
    assert drafter.counts.accepted > 20


def test_a_right_drafter_rests_while_no_draft_pays():
    """Two tokens take three times as long as one."""
    service = drafting()
    policy = DraftPolicy(Latency({1: 0.002, 2: 0.006, 64: 0.2}))
    policy.latency.note_target = lambda *values: None
    drafter = offered(service, policy=policy)
    same(engine(Slow(), speculator=drafter), [([1, 2], replace(GREEDY, max_tokens=150))])
    service.close()
    assert service.counts.drafted < 40, "it drafted on"
    assert policy.acceptance.rates(-1, 0, 1)[0] > 0.7, "its guesses were right"


def test_only_drafts_that_a_pass_ran_are_judged():
    service, policy = drafting(), Waiting()
    policy.select = lambda sequences, drafts, *more, **options: [None] * len(drafts)
    drafter = served(service, [([1, 2], GREEDY)], policy=policy)
    assert drafter.counts.drafts == 0 and drafter.proposer.pool.drafter.verdicts == []


def test_waiting_is_chosen_where_it_gives_more_tokens_a_second():
    policy = DraftPolicy(Latency({1: 0.010, 64: 0.010}))  # a pass takes 10 ms, however many tokens it has
    rates = [0.8] * 4
    gain = 0.8 + 0.8**2 + 0.8**3 + 0.8**4
    assert best_wait([0.010 * gain * 0.9], 0, 1, rates, policy) > 0  # (1 + gain) / (w + t) > 1 / t
    assert best_wait([0.010 * gain * 1.1], 0, 1, rates, policy) == 0
    for share, waits in ((1.01, False), (1.03, True)):  # of the plain speed; GAIN lies between
        seconds = 0.010 * ((1 + gain) / share - 1)
        assert bool(best_wait([seconds], 0, 1, rates, policy)) == waits
    assert best_wait([0.001], 0, 1, [0.0] * 4, policy) == 0
    assert best_wait([0.001, 0.9], 0, 2, rates, policy) == 0.001  # not for the second
    assert best_wait([0.020], 7, 8, rates, policy) == 0  # seven would wait for one
    assert best_wait([0.001], 0, 1, rates, DraftPolicy(Latency())) == 0


def test_depth_is_that_of_the_highest_speed():
    flat = DraftPolicy(Latency({1: 0.010, 64: 0.010}))
    assert best_depth(flat, 1, 8)[0] == 8
    steep = DraftPolicy(Latency({1: 0.010, 2: 0.019, 64: 0.6}))
    assert best_depth(steep, 1, 8)[0] == 1


def test_guesses_that_come_too_late_are_made_longer():
    """One token pays in a pass, and offers come two passes late: they must be longer to be of use."""
    service, held = drafting(), []

    def late(offer: Offer):
        held.append(offer)
        return [held.pop(0)] if len(held) > 2 else []

    drafter = offered(service, late, Waiting())
    drafter.proposer.policy.latency = Latency({1: 0.002, 2: 0.0021, 64: 0.2})
    same(engine(Slow(), speculator=drafter), [([1, 2], replace(GREEDY, max_tokens=120))])
    service.close()
    assert drafter.proposer.ahead > 2 and drafter.counts.drafts > 0


def test_guesses_go_farther_where_answers_take_longer():
    aheads = []
    for seconds in (0.001, 0.05):
        service = drafting()
        drafter = offered(service, policy=Waiting())
        drafter.policy.latency = drafter.proposer.policy.latency = Latency({1: 0.010, 64: 0.010})
        running = engine(Slow(), speculator=drafter)
        running.add([1, 2, 3], GREEDY)
        drafter.proposer.pool.drafter.turnaround.note(seconds)
        for _ in range(4):
            running.step()
        drafter.proposer._passes = 0
        drafter.proposer._refresh(1)
        aheads.append(drafter.proposer.ahead)
        running.cancel("0")
        service.close()
    assert aheads[0] < aheads[1]
