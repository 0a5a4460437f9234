"""What the speculator passes on: requests to the proposer, times and counts to the policy, ends to both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from attar.measure.speculation.profile import FixedPolicy
from attar.runtime.admission import Limits
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.latency import Latency
from attar.runtime.speculate.loss_budget import BUDGET, LOSS, REOPENS
from attar.runtime.speculate.policy import MAX_SKIPPED_PASSES, PLAIN_EVERY, SHARE, DraftPolicy
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest
from attar.runtime.speculate.speculative_pass import SIBLINGS_EVERY, SpeculationCounts
from attar.runtime.speculate.speculator import PassState, Speculator
from tests.runtime.fake_runner import FakeRunner
from tests.runtime.speculate.proposing import Drawer, Eager, Oracle, speculator
from tests.runtime.speculate.test_engine import GREEDY, alone, same, truths
from tests.runtime.test_engine import engine, finish, results


def watched(proposer: Oracle) -> list[DraftRequest]:
    """The wishes that a proposer gets from now on."""
    seen: list[DraftRequest] = []
    propose = proposer.propose
    proposer.propose = lambda wishes: seen.extend(wishes) or propose(wishes)  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("kind", [Oracle, Drawer])
def test_a_wish_has_its_tenant_and_its_tokens(kind: type[Oracle]) -> None:
    proposer = kind([])
    running, wishes = engine(speculator=speculator(proposer)), watched(proposer)
    for salt in ("one", "two"):
        running.add([ord(salt[0]) % 50, 2], replace(GREEDY, max_tokens=6), salt=salt)
    finish(running)
    assert {wish.salt for wish in wishes} == {"one", "two"}
    for wish in wishes:
        assert wish.salt == {ord("o") % 50: "one", ord("t") % 50: "two"}[wish.tokens[0]]


def test_no_noise_is_given_twice() -> None:
    """Exact rounds of all texts of a request, and of requests with different seeds."""
    drawer = Drawer([])
    wishes: list[Any] = []
    propose = drawer.propose
    drawer.propose = lambda asked: (
        wishes.extend(  # type: ignore[method-assign]
            (wish.rules.noise, len(wish.tokens)) for wish in asked
        )
        or propose(asked)
    )
    running = engine(FakeRunner(blocks=200), speculator=speculator(drawer, verification="exact"))
    for seed in range(3):
        running.add([1, 2], SamplingParams(seed=seed, n=3, max_tokens=12, ignore_eos=True))
    finish(running)
    noises = [noise for noise, _ in wishes]
    assert len(noises) > 30 and len(set(noises)) == len(noises)
    assert {(noise.seed, noise.sample) for noise in noises} == {(s, n) for s in range(3) for n in range(3)}
    assert all(noise.position == count for noise, count in wishes)


@pytest.mark.parametrize("chunk", [2, 3])
def test_a_pass_runs_no_more_of_a_text_than_a_chunk(chunk: int) -> None:
    """Eviction counts on it (``Eviction.most``)."""
    requests = [([1, 2, 3], GREEDY), ([4], GREEDY)]
    runner = FakeRunner()
    subject = speculator(Oracle(truths(requests), right=0.9), most=8)
    same(engine(runner, limits=Limits(sequences=4, chunk=chunk), speculator=subject), requests)
    assert (
        max(span.count for step in runner.steps for span in step.spans) == chunk and subject.counts.accepted
    )


class Clock:
    """Seconds that pass where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float, method: Any) -> Any:
        def slow(*given: Any) -> Any:
            self.now += seconds
            return method(*given)

        return slow


class ToldPolicy(Eager):
    """Writes down what it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[tuple[list[int], float, float, int]] = []
        self.gone: list[int] = []

    def note(
        self,
        news: Sequence[DraftFeedback],
        seconds: float,
        drafting: float = 0.0,
        prompt_tokens: int = 0,
        steps: int = 0,
        prefilled: bool = False,
    ) -> None:
        self.passes.append(([one.sequence for one in news], seconds, drafting, prompt_tokens))

    def forget(self, sequence: int) -> None:
        self.gone.append(sequence)


def test_the_policy_learns_what_every_pass_took() -> None:
    """A pass of 10 s, 3 s of proposing before it, and 2 s of observing the one before; with prefill."""
    requests = [([1, 2, 3], replace(GREEDY, max_tokens=9)), ([4, 5, 6, 7], replace(GREEDY, max_tokens=3))]
    oracle, policy, clock, runner = Oracle(truths(requests), chains=True), ToldPolicy(), Clock(), FakeRunner()
    oracle.propose = clock.spend(3.0, oracle.propose)  # type: ignore[method-assign]
    oracle.observe = clock.spend(2.0, oracle.observe)  # type: ignore[method-assign]
    runner.run = clock.spend(10.0, runner.run)  # type: ignore[method-assign]
    running = engine(runner, speculator=Speculator(oracle, policy, most=4, clock=clock))
    running.add(*requests[0])
    running.step()
    running.add(*requests[1])
    running.step()
    first, second = policy.passes
    assert first == ([], 10.0, 0.0, 3), "a prompt alone: its token is not decoded, nothing is drafted"
    assert second == ([0], 10.0, 5.0, 4), "the prompt of the other is in the batch"
    running.step()
    assert policy.passes[2] == ([0, 1], 10.0, 5.0, 0)
    finish(running)
    assert sorted(policy.gone) == sorted(oracle.forgotten) == [0, 1]


@pytest.mark.parametrize("n", [1, 3])
def test_usage_of_a_request_is_what_was_counted(n: int) -> None:
    request = ([1, 2, 3], replace(GREEDY, n=n, temperature=0.7, seed=1))
    subject = speculator(Oracle(truths([request]), right=0.5))
    running = engine(FakeRunner(blocks=200), speculator=subject)
    name = running.add(*request)
    usage = results(finish(running), {name: request})[name].usage
    counts = subject.counts
    assert 0 < counts.accepted < counts.drafted
    assert (usage.drafted_tokens, usage.accepted_tokens) == (counts.drafted, counts.accepted)


def test_counts_for_another_thread_stay_as_they_were() -> None:
    counts = SpeculationCounts()
    counts.note(4, 2)
    kept = counts.copy()
    counts.note(3, 3)
    assert kept == SpeculationCounts(1, 4, 2, [1, 1]) and counts == SpeculationCounts(2, 7, 5, [2, 2, 1])


class Barren(Oracle):
    """Is asked, and has nothing to say."""

    def propose(self, wishes: Sequence[DraftRequest]) -> list[None]:
        return [None] * len(wishes)


def asked_in(passes: int, seconds: float) -> tuple[list[bool], DraftPolicy]:
    """The passes in which a proposer without drafts is called, where a call takes ``cost`` plain passes."""
    clock, runner, proposer = Clock(), FakeRunner(blocks=200, context=None), Barren([])
    wishes = watched(proposer)
    proposer.propose = clock.spend(seconds, proposer.propose)  # type: ignore[method-assign]
    runner.run = clock.spend(1.0, runner.run)  # type: ignore[method-assign]
    policy = DraftPolicy(Latency({1: 1.0, 8: 2.0}))
    running = engine(runner, speculator=Speculator(proposer, policy, most=4, clock=clock))
    running.add([1, 2, 3], replace(GREEDY, max_tokens=passes + 1))
    running.step()
    actual = []
    for _ in range(passes):
        before = len(wishes)
        running.step()
        actual.append(len(wishes) > before)
    finish(running)
    return actual, policy


def test_an_empty_answer_is_followed_by_a_pause_where_asking_is_dear() -> None:
    cheap, _ = asked_in(40, SHARE / 2)
    assert all(cheap[:-1]), "the last token needs no drafts"
    dear, _ = asked_in(40, 4.5 * SHARE)
    assert [index for index, asked in enumerate(dear) if asked] == list(range(0, 40, 5)), "four plain between"
    dearest, _ = asked_in(40, 0.5)
    assert [index for index, asked in enumerate(dearest) if asked] == list(
        range(0, 39, MAX_SKIPPED_PASSES + 1)
    )


def test_a_closed_budget_means_passes_as_without_speculation() -> None:
    asked, policy = asked_in(400, 1.0)
    last = max(index for index in range(100) if asked[index])
    again = asked.index(True, last + 1)
    assert again - last > REOPENS * BUDGET / LOSS, "as long as the budget needs"
    assert sum(asked) * 1.0 <= BUDGET + 1.0 + LOSS * 400, "what was lost is what the budget had"
    assert policy.latency.target(1, 1) == pytest.approx(1.0)


def test_a_draft_model_that_reads_a_text_is_not_taken_for_a_slow_one() -> None:
    """The first round of each text is charged, with half a budget at most; the others tell a step's time."""
    requests = [(list(range(1, 30)), replace(GREEDY, max_tokens=30))]
    oracle, clock, runner = Oracle(truths(requests), chains=True), Clock(), FakeRunner()
    oracle.is_free_of_compute = False
    propose, rounds = oracle.propose, []
    oracle.propose = lambda wishes: (  # type: ignore[method-assign]
        rounds.append(clock.spend(0.1 if rounds else 50.0, propose)(wishes)) or rounds[-1]
    )
    runner.run = clock.spend(1.0, runner.run)  # type: ignore[method-assign]
    policy = DraftPolicy(Latency({1: 1.0, 8: 1.0}, {1: 0.05}), most=4)
    running = engine(runner, speculator=Speculator(oracle, policy, most=4, clock=clock))
    running.add(*requests[0])
    running.step()
    running.step()
    assert BUDGET / 2 <= policy.budget.left < BUDGET and policy.latency.draft(1) == 0.05
    finish(running)
    assert len(rounds) > 3 and 0.02 < policy.latency.draft(1) < 0.1


class Mute(Barren):
    """A free proposer that says so before it is asked in full; from a number of tokens on it has a draft."""

    def __init__(self, speaks: int = 1 << 30, seconds: float = 0.0) -> None:
        super().__init__([])
        self.speaks, self.seconds, self.clock = speaks, seconds, Clock()
        self.asked, self.looked, self.known = list[int](), list[int](), dict[int, int]()

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Any]:
        for wish in wishes:
            self.asked.append(len(wish.tokens))
            self.known[wish.sequence] = len(wish.tokens)
        return [Draft.chain([0]) if len(wish.tokens) >= self.speaks else None for wish in wishes]

    def has_draft(self, sequence: int, tokens: Sequence[int], most: int) -> bool:
        self.clock.now += self.seconds
        self.looked.append(len(tokens))
        return sequence not in self.known or len(tokens) >= self.speaks

    def forget(self, sequence: int) -> None:
        self.known.pop(sequence, None)


def decoded_with(proposer: Mute, passes: int) -> tuple[DraftPolicy, Any]:
    """One sequence of three prompt tokens and so many passes of a second."""
    runner = FakeRunner(blocks=400, context=None)
    runner.run = proposer.clock.spend(1.0, runner.run)  # type: ignore[method-assign]
    policy = DraftPolicy(Latency({1: 1.0, 8: 1.1}))
    running = engine(runner, speculator=Speculator(proposer, policy, most=4, clock=proposer.clock))
    running.add([1, 2, 3], replace(GREEDY, max_tokens=passes + 1))
    finish(running)
    return policy, running


def test_after_a_proposal_in_vain_passes_are_looked_up_and_every_sixteenth_is_planned() -> None:
    proposer = Mute()
    decoded_with(proposer, 48)
    assert proposer.asked == [4, 20, 36], "tokens of the sequence: the prompt's, and one of each pass"
    assert proposer.looked == [tokens for tokens in range(5, 52) if tokens not in proposer.asked]
    assert not proposer.known, "it is forgotten when it has ended"


def test_a_look_up_that_finds_a_draft_is_proposed_for_in_the_same_pass() -> None:
    proposer = Mute(speaks=11)
    decoded_with(proposer, 20)
    assert proposer.asked[:3] == [4, 11, 12] and proposer.looked == [5, 6, 7, 8, 9, 10, 11]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("seconds", "skipped"),
    [(SHARE / 2, 0), (4.5 * SHARE, 4), (0.05, 6), (0.3, MAX_SKIPPED_PASSES)],
)
def test_look_ups_are_followed_by_skipped_passes_too(seconds: float, skipped: int) -> None:
    proposer = Mute(seconds=seconds)
    policy, _ = decoded_with(proposer, 260)
    gaps = {later - before for before, later in zip(proposer.looked, proposer.looked[1:], strict=False)}
    assert skipped + 1 in gaps and gaps <= {skipped + 1, skipped + 2}, "one more where a pass is planned"
    lost = len(proposer.looked) * seconds - LOSS * 260
    assert policy.budget.left >= BUDGET - max(lost, 0.0) - seconds - LOSS * MAX_SKIPPED_PASSES
    assert lost < 0 or policy.budget.left < BUDGET


def test_a_sequence_that_joins_is_asked_for_at_once() -> None:
    proposer = Mute()
    runner = FakeRunner(blocks=400, context=None)
    subject = Speculator(proposer, DraftPolicy(Latency({1: 1.0, 8: 1.1})), most=4, clock=proposer.clock)
    running = engine(runner, speculator=subject)
    running.add([1, 2, 3], replace(GREEDY, max_tokens=40))
    for _ in range(5):
        running.step()
    assert proposer.asked == [4] and proposer.looked == [5, 6, 7]
    running.add([4, 5, 6, 7], replace(GREEDY, max_tokens=4))
    finish(running)
    assert 5 in proposer.asked[1:], "the second sequence's first proposal"
    assert subject.failure is None and running.scheduler.idle


def test_a_look_up_that_fails_ends_speculation_and_no_request(broken_proposers: list[str]) -> None:
    proposer = Mute()
    proposer.has_draft = lambda *asked: 1 / 0  # type: ignore[method-assign, assignment]
    _, running = decoded_with(proposer, 12)
    assert isinstance(running.speculator.failure, ZeroDivisionError) and running.scheduler.idle
    assert len(broken_proposers) == 1
    broken_proposers.clear()


@pytest.mark.parametrize("method", ["note_lookup", "note", "select", "passes_to_skip", "forget"])
def test_a_policy_that_fails_ends_speculation_and_no_request(
    method: str, broken_proposers: list[str]
) -> None:
    proposer = Mute(speaks=9)
    policy = DraftPolicy(Latency({1: 1.0, 8: 1.1}))
    setattr(policy, method, lambda *given, **named: 1 / 0)
    running = engine(speculator=Speculator(proposer, policy, most=4, clock=proposer.clock))
    request = ([1, 2, 3], replace(GREEDY, max_tokens=16))
    name = running.add(*request)
    (sample,) = results(finish(running), {name: request})[name].samples
    assert list(sample.token_ids) == alone(*request)
    assert isinstance(running.speculator.failure, ZeroDivisionError) and running.scheduler.idle
    assert len(broken_proposers) == 1
    broken_proposers.clear()


def test_skipped_passes_are_not_measured() -> None:
    """Four passes as without speculation after each empty proposal."""
    clock, runner, proposer = Clock(), FakeRunner(blocks=200, context=None), Barren([])
    proposer.observe = clock.spend(0.5, proposer.observe)  # type: ignore[method-assign]
    runner.run = clock.spend(1.0, runner.run)  # type: ignore[method-assign]
    policy = DraftPolicy(Latency({1: 1.0, 8: 2.0}))
    heard, note = [], policy.note
    policy.note = lambda news, target, *others: (  # type: ignore[method-assign]
        heard.append(target) or note(news, target, *others)
    )
    policy.passes_to_skip = lambda batch, proposing, is_lookup: 4 if proposing else 0  # type: ignore[method-assign]
    running = engine(runner, speculator=Speculator(proposer, policy, most=4, clock=clock))
    running.add([1, 2, 3], replace(GREEDY, max_tokens=21))
    running.step()
    heard.clear()
    states = []
    for _ in range(20):
        states.append(running.speculator.state)  # type: ignore[union-attr]
        running.step()
    assert heard == [1.0] * 4, "nor is the time of observing taken for that of a pass"
    assert states == [PassState.DRAFTING, *[PassState.SKIPPING] * 4] * 4


def test_who_gets_drafts_is_asked_again_however_dear() -> None:
    requests = [([1, 2, 3], replace(GREEDY, max_tokens=60))]
    oracle, clock, runner = Oracle(truths(requests), right=1.0, chains=True), Clock(), FakeRunner()
    oracle.random.randint = lambda low, high: high  # type: ignore[method-assign]
    wishes = watched(oracle)
    oracle.propose = clock.spend(0.2, oracle.propose)  # type: ignore[method-assign]
    runner.run = clock.spend(1.0, runner.run)  # type: ignore[method-assign]
    running = engine(
        runner, speculator=Speculator(oracle, DraftPolicy(Latency({1: 1.0, 8: 1.0})), most=4, clock=clock)
    )
    running.add(*requests[0])
    running.step()
    passes = 0
    while not running.idle:
        running.step()
        passes += 1
    assert len(wishes) in (passes, passes - 1), "but for the last token"


@pytest.mark.slow
def test_one_stall_while_asking_does_not_end_speculation() -> None:
    """A machine that stood still for 300 passes in one proposal; half a budget is charged."""
    requests = [([1, 2, 3], replace(GREEDY, max_tokens=900))]
    clock, runner = Clock(), FakeRunner(blocks=2000, context=None)
    oracle = Oracle(truths(requests), chains=True, size=4)
    wishes, propose, calls = watched(oracle), oracle.propose, []

    def slow(given: Sequence[DraftRequest]) -> Any:
        calls.append(0)
        clock.now += 300.0 if len(calls) == 5 else 0.001
        return propose(given)

    oracle.propose = slow  # type: ignore[method-assign]
    runner.run = clock.spend(1.0, runner.run)  # type: ignore[method-assign]
    subject = Speculator(oracle, DraftPolicy(Latency({1: 1.0, 8: 1.0})), most=4, clock=clock)
    running = engine(runner, speculator=subject)
    running.add(*requests[0])
    finish(running)
    assert len(wishes) > 100 and subject.counts.accepted > 300


def test_a_pass_kept_plain_to_be_measured_is_not_an_empty_answer() -> None:
    clock, runner, proposer = Clock(), FakeRunner(blocks=200, context=None), Oracle([])
    proposer.propose = lambda wishes: [Draft.chain([0, 0]) for _ in wishes]  # type: ignore[method-assign]
    wishes = watched(proposer)
    proposer.propose = clock.spend(0.2, proposer.propose)  # type: ignore[method-assign]
    runner.run = clock.spend(1.0, runner.run)  # type: ignore[method-assign]
    policy = DraftPolicy(Latency({1: 1.0, 8: 1.0}))
    policy._since_plain = PLAIN_EVERY
    running = engine(runner, speculator=Speculator(proposer, policy, most=4, clock=clock))
    running.add([1, 2, 3], replace(GREEDY, max_tokens=12))
    for _ in range(4):
        running.step()
    assert len(wishes) == 2, "in every pass behind the prompt's but the plain one: no pause follows"


@pytest.mark.parametrize("asking", [1.0, 1.5, 3.5])
def test_a_pause_earns_a_rate_a_pass_and_no_more(asking: float) -> None:
    clock, runner, proposer = Clock(), FakeRunner(blocks=200, context=None), Barren([])
    proposer.propose = clock.spend(asking * SHARE, proposer.propose)  # type: ignore[method-assign]
    runner.run = clock.spend(1.0, runner.run)  # type: ignore[method-assign]
    policy = DraftPolicy(Latency({1: 1.0, 8: 2.0}))
    note, credited = policy.budget.note, []
    policy.budget.note = lambda cost, tokens: credited.append(tokens) or note(cost, tokens)  # type: ignore
    running = engine(runner, speculator=Speculator(proposer, policy, most=4, clock=clock))
    running.add([1, 2, 3], replace(GREEDY, max_tokens=41))
    running.step()
    finish(running)
    assert 32 <= sum(credited) <= 40


def test_the_speculators_time_is_charged_without_a_proposal_too() -> None:
    """Two seconds after each of two passes, which the next pays for."""
    clock, runner, messages, proposer = Clock(), FakeRunner(), ToldPolicy(), Barren([])
    proposer.observe = clock.spend(2.0, proposer.observe)  # type: ignore[method-assign]
    messages.open = False  # type: ignore[assignment]
    running = engine(runner, speculator=Speculator(proposer, messages, most=4, clock=clock))
    running.add([1, 2, 3], replace(GREEDY, max_tokens=9))
    for _ in range(3):
        running.step()
    assert [draft for _, _, draft, _ in messages.passes] == [0.0, 2.0, 2.0]
    finish(running)


def test_siblings_are_drafted_now_and_then_where_none_pay() -> None:
    requests = [([1, 2, 3], replace(GREEDY, max_tokens=60))]
    oracle = Oracle(truths(requests), chains=True)
    oracle.is_free_of_compute = False
    wishes = watched(oracle)
    finish_all = engine(FakeRunner(blocks=200), speculator=speculator(oracle, most=2))
    same(finish_all, requests)
    asked = [wish.siblings for wish in wishes]
    assert 0 < sum(asked) <= len(asked) / SIBLINGS_EVERY + 1


def test_a_failure_leaves_plain_passes(broken_proposers: list[str]) -> None:
    """Whatever fails: nothing is drafted, measured or asked any more, and every request ends as without."""
    for name in ("propose", "observe", "forget"):
        requests = [([1, 2, 3], replace(GREEDY, max_tokens=20)), ([4, 5], replace(GREEDY, max_tokens=9))]
        oracle = Oracle(truths(requests), chains=True)
        setattr(oracle, name, lambda *asked: 1 / 0)
        subject = speculator(oracle)
        running = engine(FakeRunner(blocks=200), speculator=subject)
        names = {running.add(prompt, params): (prompt, params) for prompt, params in requests}
        for request, result in results(finish(running), names).items():
            assert list(result.samples[0].token_ids) == alone(*names[request])
        assert isinstance(subject.failure, ZeroDivisionError) and subject.state is PassState.PLAIN
    assert len(broken_proposers) == 3
    broken_proposers.clear()


def test_fixed_numbers_are_drafted_whatever_reading_costs() -> None:
    requests = [(list(range(1, 30)), replace(GREEDY, max_tokens=20))]
    oracle = Oracle(truths(requests), right=0.0, chains=True)
    oracle.is_free_of_compute = False
    policy = FixedPolicy(2, Latency({1: 1e-9, 8: 2e-9}, {1: 1.0}, reading=1.0))
    subject = Speculator(oracle, policy, most=2)
    same(engine(FakeRunner(blocks=200), speculator=subject), requests)
    assert subject.counts.drafts >= 10
