"""An error in any call of the engine ends the request it belongs to, and no other; every block comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from attar.errors import GrammarError
from attar.runtime.admission import Limits
from attar.runtime.engine import Engine
from attar.runtime.kv.evict import H2O, SnapKV
from attar.runtime.llm import LLM
from attar.runtime.results import Event, Result
from attar.runtime.sampling.grammar import MaskTime
from attar.runtime.sampling.params import SamplingParams
from tests.runtime.fake_runner import VOCABULARY, FakeRunner
from tests.runtime.faults import HARMLESS, PLACES, Fault, FaultError, Faults
from tests.runtime.speculate.proposing import Oracle, speculator
from tests.runtime.test_engine import alone, engine, finish, letters, results

PLAIN = SamplingParams(seed=3, max_tokens=14, ignore_eos=True, stop=("zzz",), logprobs=2, prompt_logprobs=1)
PROMPTS = [[1, 2, 3], [4, 5], [1, 2, 3, 9, 9], [7]]
GUILTY = 1


class Even:
    """A grammar of even tokens; stands for llguidance's matcher."""

    complete, last_s = False, 0.0
    time = MaskTime()

    def copy(self) -> Even:
        return Even()

    def after(self, tokens: Sequence[int]) -> Even:
        return self

    def allowed(self, ends: Sequence[int] = ()) -> torch.Tensor:
        return torch.arange(VOCABULARY) % 2 == 0

    def consume(self, token: int) -> None:
        assert token % 2 == 0


class EvenGrammars:
    """Of every regex the same grammar."""

    def prepare(self) -> None:
        pass

    def matcher(self, params: SamplingParams, tenant: str = "") -> Even | None:
        return None if params.guide is None else Even()


def engine_at(component: str, runner: FakeRunner | None = None) -> Engine:
    drafter = None
    if component in ("verify", "move", *HARMLESS):
        truths = [[*prompt, *alone(prompt, PLAIN)] for prompt in PROMPTS]
        drafter = speculator(Oracle(truths, right=0.7))
    running = engine(runner, speculator=drafter)
    running.grammars = EvenGrammars()  # type: ignore[assignment]
    return running


def asked(running: Engine, params: SamplingParams) -> dict[str, tuple[list[int], SamplingParams]]:
    return {running.add(prompt, params): (prompt, params) for prompt in PROMPTS}


def undisturbed(params: SamplingParams) -> list[Result]:
    running = engine_at("")
    names = asked(running, params)
    return list(results(finish(running), names).values())


def held(running: Engine) -> None:
    """Nothing leaked, and it still works."""
    running.check()
    manager = running.scheduler.manager
    assert running.idle and manager.free + manager.cached == manager.capacity
    params = replace(PLAIN, seed=8)
    name = running.add([30, 31], params)
    got = results(finish(running), {name: ([30, 31], params)})[name]
    assert list(got.token_ids) == alone([30, 31], params)


@pytest.mark.few(12)
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize(
    "component", [component for component in PLACES if component not in ("pack", "pages")]
)
def test_an_error_ends_its_own_request_and_no_other(
    component: str, after: int, monkeypatch: pytest.MonkeyPatch, broken_proposers: list[str]
) -> None:
    if component in ("admit", "fork", "forget", "move") and after:
        pytest.skip("it is called once")
    params = replace(
        PLAIN, n=2 if component == "fork" else 1, regex="even" if component == "grammar" else None
    )
    want = undisturbed(params)
    running = engine_at(component)
    faults = Faults(running, monkeypatch)
    names = asked(running, params)
    guilty = list(names)[GUILTY]
    faults.guilty[guilty] = Fault(component, after)
    events = finish(running)
    assert faults.raised, "nothing was raised"
    got = results(events, names)
    for name, expected in zip(names, want, strict=True):
        if name != guilty or component in HARMLESS:
            assert got[name].samples == expected.samples, name
            assert got[name].prompt_logprobs == expected.prompt_logprobs
        else:
            ended = [event for event in events if event.request == name and event.finished]
            assert [event.finish_reason for event in ended] == ["error"] * params.n
            assert all(isinstance(event.failure, FaultError) for event in ended)
            assert all(event.error == f"FaultError: {component}" for event in ended)
    if component in ("propose", "observe", "note", "plan"):
        assert running.speculator is not None and running.speculator.failure is not None
        assert len(broken_proposers) == 1
        broken_proposers.clear()
    faults.guilty.clear()
    held(running)


@pytest.mark.parametrize("component", ["sample", "detokenize", "run", "verify"])
def test_keyboard_interrupts_pass(component: str, monkeypatch: pytest.MonkeyPatch) -> None:
    running = engine_at(component)
    faults = Faults(running, monkeypatch)
    names = asked(running, PLAIN)
    faults.guilty[next(iter(names))] = Fault(component, 1, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        finish(running)
    faults.guilty.clear()
    for name in names:
        running.cancel(name)
    running.check()
    assert running.idle


def test_a_failed_detokenizer_is_reported_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where even the held-back text cannot be decoded, the first error is reported."""
    running = engine_at("detokenize")
    faults = Faults(running, monkeypatch)
    name = running.add([1], PLAIN)
    faults.guilty[name] = Fault("detokenize")
    (event,) = finish(running)
    assert event.text == "" and event.error == "FaultError: detokenize" and len(faults.raised) == 2


def test_a_panic_of_the_tokenizer_is_an_error_of_its_request() -> None:
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})

    def decode(ids: Sequence[int], skip: bool) -> str:
        if 9 in ids:
            raise panic("out of range")
        return letters(ids, skip)

    running = engine()
    running.decode = decode
    names = asked(running, PLAIN)
    events = finish(running)
    broken = {event.request for event in events if event.failure is not None}
    assert list(names)[2] in broken and len(broken) < len(names)
    assert "the tokenizer: out of range" in {str(event.failure) for event in events}
    for name in set(names) - broken:
        prompt, params = names[name]
        assert list(results(events, names)[name].token_ids) == alone(prompt, params)


def test_a_request_whose_texts_cannot_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    running = engine()
    monkeypatch.setattr("attar.runtime.engine.RequestState.of", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        running.add([1], PLAIN)
    monkeypatch.undo()
    assert running.idle
    held(running)


@pytest.mark.parametrize("where", ["divide", "make_step"])
def test_an_error_of_no_sequence_ends_running_requests_and_not_waiting_ones(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = engine(limits=Limits(sequences=2))
    names = asked(running, PLAIN)
    events = running.step()
    monkeypatch.setattr(f"attar.runtime.scheduler.{where}", lambda *_: 1 / 0)
    events += running.step()
    monkeypatch.undo()
    events += finish(running)
    ended = {event.request: event.finish_reason for event in events if event.finished}
    assert [ended[name] for name in names] == ["error", "error", "length", "length"]
    held(running)


def test_where_nothing_runs_the_first_that_waits_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    running = engine()
    names = asked(running, PLAIN)
    monkeypatch.setattr(running.scheduler, "_expire", lambda now: 1 / 0)
    events: list[Event] = []
    for _ in names:
        events += running.step()
    assert [event.request for event in events] == list(names)
    assert all(isinstance(event.failure, ZeroDivisionError) for event in events)


@pytest.mark.slow
def test_copies_are_made_whichever_sequence_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of one prompt share its last block: a step copies it, and one of the step's sequences fails."""
    params = replace(PLAIN, n=3, prompt_logprobs=None)
    for after in range(1, 6):
        running = engine(FakeRunner(100))
        faults = Faults(running, monkeypatch)
        names = {running.add(prompt, params): (prompt, params) for prompt in ([1, 2, 3], [4], [5, 6])}
        guilty = next(iter(names))
        faults.guilty[guilty] = Fault("run", after)
        got = results(finish(running), names)
        for name, (prompt, _) in names.items():
            if name != guilty:
                tokens = [list(text.token_ids) for text in got[name].samples]
                assert tokens == [alone(prompt, params, index) for index in range(3)]
        faults.guilty.clear()
        held(running)
        monkeypatch.undo()


@pytest.mark.few(1)
@pytest.mark.parametrize("component", ["reserve", "commit", "sample", "detokenize", "run"])
def test_a_text_that_fails_takes_those_of_its_request_along(
    component: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that were planned, run or drawn before it in the same step."""
    params = replace(PLAIN, n=3, prompt_logprobs=None)
    for after in range(3, 9):
        running = engine()
        faults = Faults(running, monkeypatch)
        names = {running.add(prompt, params): (prompt, params) for prompt in ([1, 2, 3], [4, 5], [7])}
        guilty = list(names)[GUILTY]
        faults.guilty[guilty] = Fault(component, after)
        events = finish(running)
        got = results(events, names)
        assert faults.raised
        for name, (prompt, _) in names.items():
            tokens = [list(text.token_ids) for text in got[name].samples]
            if name != guilty:
                assert tokens == [alone(prompt, params, index) for index in range(3)]
        assert {text.finish_reason for text in got[guilty].samples} == {"error"}
        faults.guilty.clear()
        held(running)
        monkeypatch.undo()


def test_a_runner_that_does_not_repeat_loses_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner()
    runner.repeats = False
    running = engine(runner, limits=Limits(sequences=2))
    faults = Faults(running, monkeypatch)
    names = asked(running, PLAIN)
    faults.guilty[list(names)[GUILTY]] = Fault("run", 2)
    ended = {event.request: event.finish_reason for event in finish(running) if event.finished}
    assert [ended[name] for name in names] == ["error", "error", "length", "length"]


@pytest.mark.slow
@pytest.mark.parametrize("component", ["pack", "pages", "reserve", "run"])
@pytest.mark.parametrize(
    "eviction", [H2O(heavy=12, recent=12, slack=8), SnapKV(capacity=24, window=8)], ids=["h2o", "snapkv"]
)
def test_an_error_while_packing_ends_its_own_request(
    eviction: H2O | SnapKV, component: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    llm = LLM("attar:tiny", kv_tokens=1024, block_size=8, eviction=eviction, limits=Limits(sequences=4))
    prompts = [llm.encode(text * 14) for text in ("def a(self):\n", "import os\n", "class Node:\n")]
    want = [result.text for result in llm.generate(prompts, params)]
    faults = Faults(llm.engine, monkeypatch)
    names = [llm.engine.add(prompt, params) for prompt in prompts]
    faults.guilty[names[GUILTY]] = Fault(component, after=0 if component in ("pack", "pages") else 3)
    events = finish(llm.engine)
    assert faults.raised
    texts = {name: "".join(event.text for event in events if event.request == name) for name in names}
    lost = range(3) if component == "run" else [GUILTY]  # what it keeps of them is not written twice
    for number, name in enumerate(names):
        reason = next(event.finish_reason for event in events if event.request == name and event.finished)
        assert reason == ("error" if number in lost else "length"), number
        assert number in lost or texts[name] == want[number]
    faults.guilty.clear()
    llm.engine.check()
    assert llm.generate(prompts[0], params)[0].text == want[0]


def test_a_grammar_that_breaks_in_a_text_is_the_clients_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    running = engine_at("grammar")
    faults = Faults(running, monkeypatch)
    name = running.add([1], replace(PLAIN, regex="even"))
    faults.guilty[name] = Fault("grammar", 2, lambda component: GrammarError("regex", "even", "simpler"))
    event = finish(running)[-1]
    assert isinstance(event.failure, GrammarError) and event.failure.kind == "grammar_too_complex"
    assert event.error == "regex is 'even', but must be simpler"
