"""Random errors in every call of an engine under load: every foreign text is as undisturbed, none leaks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import pytest

from attar.errors import DataError
from attar.runtime.admission import Limits
from attar.runtime.engine import Engine
from attar.runtime.llm import LLM
from attar.runtime.results import Event, Result
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.suffix import SuffixProposer
from tests.runtime.fake_runner import VOCABULARY, FakeRunner
from tests.runtime.faults import HARMLESS, PLACES, Fault, FaultError, Faults
from tests.runtime.speculate.proposing import Drawer, Oracle, speculator
from tests.runtime.test_engine import alone, engine, finish, random_params, results
from tests.runtime.test_request_faults import EvenGrammars

RATE = 0.2  # of the requests are broken
Asked = list[tuple[list[int], SamplingParams]]


def requests(count: int, seed: int) -> Asked:
    """Prompts that share beginnings, and parameters of every kind."""
    draws = random.Random(seed)
    stems = [[draws.randrange(VOCABULARY) for _ in range(24)] for _ in range(3)]
    engine_of = []
    for number in range(count):
        prompt = [*draws.choice(stems)[: draws.randint(1, 24)], draws.randrange(VOCABULARY)]
        params = replace(
            random_params(draws),
            seed=number,
            max_tokens=draws.randint(1, 12),
            regex="even" if draws.random() < 0.1 else None,
            stop=("QQ", "ABC") if draws.random() < 0.3 else (),
            temperature=draws.choice([0.0, 0.7, 1.0, 1e-300]),
            prompt_logprobs=draws.choice([None, None, None, 1]),
        )
        engine_of.append((prompt, params))
    return engine_of


def engine_of(kind: str, blocks: int, asked: Asked = ()) -> Engine:  # type: ignore[assignment]
    """An engine whose pool is too small for all that runs, so that sequences are preempted."""
    proposer = {
        "plain": lambda: None,
        "ngram": SuffixProposer,
        "oracle": lambda: Oracle([[*p, *alone(p, q)] for p, q in asked[:40] if q.guide is None], right=0.8),
        "drawer": lambda: Drawer([], size=4),
    }[kind]()
    drafter = None if proposer is None else speculator(proposer)
    running = engine(FakeRunner(blocks), limits=Limits(step_tokens=48, sequences=12), speculator=drafter)
    running.grammars = EvenGrammars()  # type: ignore[assignment]
    return running


def ran(running: Engine, asked: Asked, seed: int) -> dict[str, tuple[int, list[Event]]]:
    """All of them, arriving over time."""
    draws, names, events = random.Random(seed), dict[str, int](), list[Event]()
    for number, (prompt, params) in enumerate(asked):
        names[running.add(prompt, params)] = number
        for _ in range(draws.choice([0, 0, 1, 3])):
            events += running.step()
    events += finish(running)
    return {name: (number, [e for e in events if e.request == name]) for name, number in names.items()}


@lru_cache(maxsize=2)
def undisturbed(count: int, seed: int) -> dict[int, Result]:
    """What the same requests get in an engine with room for all and without errors."""
    asked = requests(count, seed)
    return texts(ran(engine_of("plain", 400), asked, seed), asked)


def texts(found: dict[str, tuple[int, list[Event]]], asked: Asked) -> dict[int, Result]:
    by_name = {name: asked[number] for name, (number, _) in found.items()}
    events = [event for _, mine in found.values() for event in mine]
    return {found[name][0]: result for name, result in results(events, by_name).items()}


def random_faults(seed: int) -> Callable[[str, SamplingParams], Fault | None]:
    draws = random.Random(seed)

    def choose(name: str, params: SamplingParams) -> Fault | None:
        if draws.random() >= RATE:
            return None
        index = draws.choice([item for item in PLACES if item not in ("propose", "observe", "note", "plan")])
        return Fault(index, after=draws.choice([0, 0, 1, 2, 5]))

    return choose


def held(kind: str, count: int, blocks: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """One life of an engine; the places where something was raised."""
    asked = requests(count, seed)
    want = undisturbed(count, seed)
    running = engine_of(kind, blocks, asked)
    faults = Faults(running, monkeypatch)
    faults.choose = random_faults(seed)
    actual = ran(running, asked, seed)
    got = texts(actual, asked)
    broken = {actual[name][0] for name in faults.broken}
    for number, expected in want.items():
        ended = {text.finish_reason for text in got[number].samples}
        if number in broken:
            assert "error" in ended or got[number].samples == expected.samples, number
        else:
            assert got[number].samples == expected.samples, (number, asked[number])
            assert got[number].prompt_logprobs == expected.prompt_logprobs
    assert all(isinstance(e.failure, FaultError) for _, mine in actual.values() for e in mine if e.error)
    assert running.idle and not running._requests
    running.check()
    manager = running.scheduler.manager
    assert manager.free + manager.cached == manager.capacity
    manager.clear()
    assert manager.free == manager.capacity, "the prefix tree kept a block"
    if running.speculator is not None:
        assert running.speculator.failure is None and running.speculator.counts.drafts
    monkeypatch.undo()
    return {index for index, _ in faults.raised}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "ngram", "oracle", "drawer"])
def test_a_hundred_requests(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raised = held(kind, 100, 60, 1, monkeypatch)
    assert len(raised) > 3, raised


@pytest.mark.slow
def test_ten_thousand_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: set[str] = set()
    for seed in range(25):
        for kind in ("plain", "ngram", "oracle", "drawer"):
            raised |= held(kind, 100, (60, 90)[seed % 2], seed, monkeypatch)
    rare = {"move", "pack", "pages", "propose", "observe", "note", "plan"}  # tests of their own
    assert raised >= {*PLACES} - rare, raised


@pytest.mark.few(1)
@pytest.mark.parametrize("component", ["propose", "observe", "note", "plan"])
def test_speculation_that_breaks_under_load(
    component: str, monkeypatch: pytest.MonkeyPatch, broken_proposers: list[str]
) -> None:
    assert component in HARMLESS
    asked = requests(15, 5)
    want = undisturbed(15, 5)
    running = engine_of("oracle", 60, asked)
    faults = Faults(running, monkeypatch)
    faults.choose = lambda name, params: Fault(component, after=2)
    got = texts(ran(running, asked, 5), asked)
    assert {n: item.samples for n, item in got.items()} == {n: item.samples for n, item in want.items()}
    assert running.speculator is not None and isinstance(running.speculator.failure, FaultError)
    assert len(broken_proposers) == 1
    broken_proposers.clear()
    running.check()


def test_the_tokenizer_of_an_llm_is_safe_while_streams_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding that fails raises in its caller; running requests continue."""
    llm = LLM("attar:tiny", kv_tokens=512)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    want = llm.generate("def a(", params)[0].text
    stream = llm.stream("def a(", params)
    text = next(stream).text
    encode = llm.prompt_tokenizer.encode
    errors = iter([FaultError("encode"), DataError("no text")])

    def broken(prompt: str) -> list[int]:
        if prompt != "x":
            raise next(errors)
        return encode(prompt)

    monkeypatch.setattr(llm.prompt_tokenizer, "encode", broken)
    for error in (FaultError, DataError):
        with pytest.raises(error):
            llm.generate(["x", "y"], params)
        text += next(stream).text
    faults = Faults(llm.engine, monkeypatch)
    faults.choose = lambda name, params: Fault("detokenize", 1)
    with pytest.raises(FaultError):
        llm.generate(["x", "x"], params)
    faults.choose = lambda name, params: None
    assert text + "".join(event.text for event in stream) == want
    assert llm.engine.idle and not llm._events
    llm.engine.check()
