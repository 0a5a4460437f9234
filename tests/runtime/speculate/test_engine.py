"""Speculation in the engine, on a runner whose logits are a function of the tokens that a row sees.

Every text must be the one that the same request gets alone, whatever is drafted; every block comes back.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from attar.runtime.admission import Limits
from attar.runtime.engine import Engine
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.penalties import TokenHistory
from attar.runtime.sampling.warp import SamplingRow, warp
from attar.runtime.speculate.latency import Latency
from attar.runtime.speculate.lookahead import LookaheadProposer
from attar.runtime.speculate.noise import DraftRules
from attar.runtime.speculate.policy import DraftPolicy
from attar.runtime.speculate.speculator import Speculator
from attar.runtime.speculate.suffix import SuffixProposer
from tests.runtime.fake_runner import VOCABULARY, FakeRunner, logits_after
from tests.runtime.speculate.laws import fits
from tests.runtime.speculate.proposing import Drawer, Oracle, speculator
from tests.runtime.test_engine import alone, engine, finish, random_params, results

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, seed=0)


class Looping(FakeRunner):
    """The same model with few tokens that follow each other often: n-grams and windows hit."""

    def _logits(self, slots):
        last = int(self.pool[slots][-1])
        row = logits_after([last % 7])
        return row + 0.3 * logits_after([int(token) for token in self.pool[slots][-2:]])


def asked(count: int, seed: int, most: int = 30) -> list[tuple[list[int], SamplingParams]]:
    draws = random.Random(seed)
    items = []
    for number in range(count):
        prompt = [draws.randrange(40) for _ in range(draws.choice([1, 3, 9, 17]))]
        params = random_params(draws)
        items.append((prompt, replace(params, max_tokens=min(params.max_tokens or most, most), seed=number)))
    return items


def truths(requests) -> list[list[int]]:
    return [prompt + alone(prompt, params, index) for prompt, params in requests for index in range(params.n)]


def same(running: Engine, requests) -> None:
    """Every text is the one of plain decoding."""
    names = {running.add(prompt, params): (prompt, params) for prompt, params in requests}
    for name, result in results(finish(running), names).items():
        prompt, params = names[name]
        for index, text in enumerate(result.samples):
            assert list(text.token_ids) == alone(prompt, params, index), (prompt, params, index)
    assert running.speculator is None or running.speculator.failure is None
    running.check()


@pytest.mark.few(1)
@pytest.mark.parametrize("chains", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_random_batches_with_trees_of_right_and_wrong_tokens(seed: int, chains: bool) -> None:
    """Mixed sampled and greedy, n texts, penalties, chunked prompts, a small step: coupled all the same."""
    requests = asked(12, seed)
    subject = speculator(Oracle(truths(requests), seed=seed, chains=chains), verification="coupled")
    limits = Limits(step_tokens=[24, 64][seed % 2], sequences=12, chunk=[None, 5][seed // 2])
    same(engine(FakeRunner(blocks=200), limits=limits, speculator=subject), requests)
    assert subject.counts.accepted > 20
    assert subject.counts.drafted > subject.counts.accepted
    assert sum(subject.counts.accepted_at) == subject.counts.accepted


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
def test_few_blocks(seed: int) -> None:
    """Sequences are preempted and resumed; drafts preempt no sequence."""
    requests = [(prompt, replace(params, n=1)) for prompt, params in asked(8, 50 + seed)]
    subject = speculator(Oracle(truths(requests), seed=seed), verification="coupled")
    running = engine(FakeRunner(blocks=10), speculator=subject)
    same(running, requests)
    assert running.scheduler.preemptions and subject.counts.accepted


def test_drafts_preempt_no_sequence() -> None:
    """Two texts fill the pool exactly; a draft has room only while there are free blocks."""
    requests = [([1, 2, 3], replace(GREEDY, max_tokens=17)), ([4, 5, 6], replace(GREEDY, max_tokens=17))]
    subject = speculator(Oracle(truths(requests), size=12, right=0.2))
    running = engine(FakeRunner(blocks=10), speculator=subject)
    same(running, requests)
    assert not running.scheduler.preemptions and subject.counts.drafts


def test_alone_in_a_full_pool() -> None:
    """The last block is filled by a text alone, with no finish for want of blocks that drafts would need."""
    request = ([1, 2, 3], replace(GREEDY, max_tokens=30))
    subject = speculator(Oracle(truths([request]), size=8, right=0.5))
    same(engine(FakeRunner(blocks=8), speculator=subject), [request])


def test_the_right_path_is_taken_whole_and_costs_few_steps() -> None:
    request = ([1, 2, 3], GREEDY)
    subject = speculator(Oracle(truths([request]), right=1.0, size=4, chains=True), most=4)
    subject.proposer.random.randint = lambda low, high: high  # type: ignore[attr-defined]
    runner = FakeRunner()
    same(engine(runner, speculator=subject), [request])
    assert len(runner.steps) == 1 + 8  # the prompt's, and 39 tokens in fives
    assert subject.counts.accepted_at == [8, 8, 8, 7]


def test_prefix_hits() -> None:
    """A second run finds what the first one published behind accepted paths."""
    prompt = list(range(20))
    requests = [(prompt, GREEDY), ([*prompt[:11], 40], GREEDY)]
    subject = speculator(Oracle(truths(requests), right=0.8))
    running = engine(FakeRunner(), speculator=subject)
    same(running, requests)
    whole = truths(requests)[0]
    longer = [(whole[:45], replace(GREEDY, max_tokens=10)), *requests]
    subject.proposer.texts = truths(longer)  # type: ignore[attr-defined]
    same(running, longer)
    assert running.scheduler.manager.stats.hit >= 40  # generated blocks, too


def test_prompts_are_not_starved() -> None:
    """A pass that prompts fill has no drafts, and one has no more tokens than the step."""
    requests = [([7, 8], GREEDY), ([3] * 60, GREEDY)]
    runner = FakeRunner()
    subject = speculator(Oracle(truths(requests), size=8), most=8)
    running = engine(runner, limits=Limits(step_tokens=16, sequences=4), speculator=subject)
    first = running.add(*requests[0])
    events = running.step()
    second = running.add(*requests[1])
    got = results(events + finish(running), {first: requests[0], second: requests[1]})
    assert [list(got[name].token_ids) for name in (first, second)] == [
        alone(*request) for request in requests
    ]
    assert all(step.count <= 16 for step in runner.steps)
    prompts = [step for step in runner.steps if any(span.count > span.wants for span in step.spans)]
    full = [step for step in prompts if step.count == 16]
    assert len(prompts) <= 6  # 60 tokens in a batch with one that decodes, 15 at a time; and the first's own
    assert len(full) >= 3 and all(min(span.count for span in step.spans) == 1 for step in full)


def test_stop_strings_and_end_tokens_inside_accepted_drafts() -> None:
    plain = [1, 2, 3]
    whole = alone(plain, GREEDY)
    texts = [plain + whole]
    stop = "".join(chr(ord("A") + token) for token in whole[13:15])
    cut = [
        replace(GREEDY, stop=(stop,)),
        replace(GREEDY, stop_ids=(whole[9],)),
        replace(GREEDY, stop_ids=(whole[9],), min_tokens=20),
        replace(GREEDY, max_tokens=7),
    ]
    for params in cut:
        without = engine()
        name = without.add(plain, params)
        want = results(finish(without), {name: (plain, params)})[name]
        for seed in range(5):
            subject = speculator(
                Oracle([plain + list(want.token_ids) + [5] * 9, *texts], right=0.9, seed=seed)
            )
            running = engine(speculator=subject)
            name = running.add(plain, params)
            got = results(finish(running), {name: (plain, params)})[name]
            assert got.samples == want.samples and subject.failure is None
            assert 0 < got.usage.accepted_tokens <= got.usage.drafted_tokens


@pytest.mark.parametrize("right", [0.0, 0.8])
def test_log_probabilities_are_the_targets(right: float) -> None:
    prompt = [5, 6, 7]
    params = replace(GREEDY, temperature=0.9, seed=3, logprobs=3, prompt_logprobs=2, max_tokens=25)
    name = (plain := engine()).add(prompt, params)
    want = results(finish(plain), {name: (prompt, params)})[name]
    subject = speculator(Oracle([prompt + list(want.token_ids)], right=right))
    running = engine(speculator=subject)
    name = running.add(prompt, params)
    got = results(finish(running), {name: (prompt, params)})[name]
    assert got.logprobs == want.logprobs and got.prompt_logprobs == want.prompt_logprobs
    assert (subject.counts.accepted > 5) == (right > 0)


def test_cancelled_and_forgotten() -> None:
    requests = [([1, 2], replace(GREEDY, n=2)), ([3, 4], GREEDY)]
    oracle = Oracle(truths(requests))
    running = engine(speculator=speculator(oracle))
    first, second = [running.add(*event) for event in requests]
    for _ in range(4):
        running.step()
    assert len(running.cancel(first)) == 2
    events = finish(running)
    assert [event.finish_reason for event in events if event.finished] == ["length"]
    assert sorted(oracle.forgotten) == [0, 1, 2]
    assert running.cancel(second) == []
    running.check()


def test_a_bad_row_ends_its_text_alone() -> None:
    requests = [([1, 2], GREEDY), ([3, 4], GREEDY)]
    texts = truths(requests)
    bad = next(token for token in texts[0][8:] if token not in texts[1] and token not in texts[0][:8])
    runner = FakeRunner()
    runner.poison = {bad}
    subject = speculator(Oracle(texts, right=0.9))
    running = engine(runner, speculator=subject)
    names = [running.add(*request) for request in requests]
    last = {event.request: event for event in finish(running) if event.finished}
    assert last[names[0]].finish_reason == "error" and "NaN" in (last[names[0]].error or "")
    assert last[names[1]].finish_reason == "length"


@pytest.mark.parametrize("where", ["propose", "observe"])
def test_a_proposer_that_fails_ends_no_request(where: str, broken_proposers: list[str]) -> None:
    """At once, or in the middle of a text; it is said once, and it is never asked again."""
    for right in (0, 3):
        oracle = Oracle(truths([([1, 2], GREEDY)]), chains=True)
        method, calls = getattr(oracle, where), []

        def broken(given, right=right, method=method, calls=calls):
            calls.append(given)
            if len(calls) > right:
                raise MemoryError("no room for the draft")
            return method(given)

        setattr(oracle, where, broken)
        subject = speculator(oracle)
        running = engine(speculator=subject)
        name = running.add([1, 2], GREEDY)
        got = results(finish(running), {name: ([1, 2], GREEDY)})[name]
        assert list(got.token_ids) == alone([1, 2], GREEDY)
        assert isinstance(subject.failure, MemoryError) and len(calls) == right + 1
        (messages,) = broken_proposers
        assert messages.startswith("speculation is off: oracle failed: no room for the draft\nTraceback")
        broken_proposers.clear()


def test_a_step_that_fails_leaves_no_drafts_behind() -> None:
    runner = FakeRunner()
    requests = [([1, 2], GREEDY), ([3, 4], GREEDY)]
    running = engine(runner, speculator=speculator(Oracle(truths(requests))))
    for request in requests:
        running.add(*request)
    for _ in range(3):
        running.step()
    runner.fails = RuntimeError("the device is gone")
    events = running.step()
    assert [event.finish_reason for event in events] == ["error", "error"]
    runner.fails = None
    same(running, requests)


@pytest.mark.few(2)
@pytest.mark.parametrize("verification", ["coupled", "exact"])
@pytest.mark.parametrize("kind", [Oracle, Drawer])
def test_tiny_temperatures_are_greedy_with_drafts_too(kind, verification) -> None:
    """Fixed and drawn drafts, coupled and exact, at temperatures that float32 does not have."""
    for number, T in enumerate((5e-324, 1e-300, 7e-46, 1e-30, 1e-6)):
        params = replace(GREEDY, temperature=T, seed=number, top_p=0.9, logit_bias={3: 1.0}, max_tokens=12)
        want = alone([1, 2], replace(params, temperature=0.0))
        subject = speculator(kind([[1, 2, *want]], right=0.8), verification=verification)
        running = engine(speculator=subject)
        name = running.add([1, 2], params)
        got = results(finish(running), {name: ([1, 2], params)})[name]
        assert list(got.token_ids) == want and subject.failure is None and subject.counts.drafts


@pytest.mark.parametrize("make", [SuffixProposer, LookaheadProposer])
@pytest.mark.parametrize("batch", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_proposers_on_a_repetitive_model(make, batch: int) -> None:
    """Greedy and coupled texts with the real proposers, eager and with the real policy."""
    requests = [([n, n + 1, n], replace(GREEDY, max_tokens=60)) for n in range(batch)]
    requests += [(p, replace(g, temperature=0.5, seed=n)) for n, (p, g) in enumerate(requests)]
    plain = engine(Looping(blocks=400))
    names = [plain.add(*request) for request in requests]
    want = results(finish(plain), dict(zip(names, requests, strict=True)))
    real = DraftPolicy(Latency({1: 1.0, 8: 1.1, 64: 2.0}), most=40)
    for result in (speculator(make(), most=40), Speculator(make(), real, most=40, clock=lambda: 0.0)):
        running = engine(Looping(blocks=400), speculator=result)
        again = [running.add(*request) for request in requests]
        got = results(finish(running), dict(zip(again, requests, strict=True)))
        assert [got[name].token_ids for name in again] == [want[name].token_ids for name in names]
        assert result.failure is None
        assert result.counts.accepted > 5 * batch


@pytest.mark.slow
def test_fifty_seeds() -> None:
    """A seeded text is the same with and without drafts, fixed or drawn with its own noise."""
    params = [
        SamplingParams(temperature=0.8, seed=seed, max_tokens=20, ignore_eos=True) for seed in range(50)
    ]
    requests = [([1, 2, 3], param) for param in params]
    for proposer in (Oracle(truths(requests)), Drawer([])):
        same(
            engine(FakeRunner(blocks=800), limits=Limits(sequences=50), speculator=speculator(proposer)),
            requests,
        )


@pytest.mark.parametrize(
    ("verification", "seed", "exact"),
    [(None, 1, False), (None, None, True), ("coupled", None, False), ("exact", 1, True)],
)
def test_what_is_verified_exactly_is_drawn_with_noise_of_its_own(verification, seed, exact: bool) -> None:
    drawer = Drawer([])
    running = engine(speculator=speculator(drawer, verification=verification))
    seen = []
    propose = drawer.propose
    drawer.propose = lambda wishes: seen.extend(wishes) or propose(wishes)  # type: ignore[method-assign]
    running.add([1, 2], SamplingParams(seed=seed, max_tokens=9, ignore_eos=True))
    finish(running)
    assert seen and all(isinstance(wish.rules, DraftRules) == exact for wish in seen)


@pytest.mark.slow
def test_exact_mode_keeps_the_law() -> None:
    """Chains drawn from a strange q, in batches: the texts of three tokens have the enumerated law."""
    params = SamplingParams(temperature=1.2, top_k=3, repetition_penalty=1.3, max_tokens=3, ignore_eos=True)
    prompt = [1, 2]
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        grown = {}
        for message, mass in law.items():
            row = SamplingRow(params, TokenHistory(prompt, list(message)), ())
            p = warp(logits_after(prompt + list(message))[None], [row])[0].numpy()
            grown |= {(*message, int(token)): mass * float(p[token]) for token in np.flatnonzero(p)}
        law = grown
    drawer = Drawer([], vocabulary=VOCABULARY, size=2)
    subject = speculator(drawer, verification="exact")
    order = {message: (index,) for index, message in enumerate(law)}
    texts = []
    for turn in range(30):
        running = engine(FakeRunner(blocks=400), limits=Limits(sequences=50), speculator=subject)
        names = [running.add(prompt, replace(params, seed=50 * turn + n)) for n in range(50)]
        message: dict[str, list[int]] = {name: [] for name in names}
        for event in finish(running):
            message[event.request] += event.token_ids
        for tokens in message.values():
            texts.append(order[tuple(tokens)])
    assert subject.failure is None and subject.counts.accepted > 20
    assert fits(texts, np.array(list(law.values())))
