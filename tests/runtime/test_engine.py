"""The engine on a runner whose logits are a function of the tokens: every text must be the one that the same
request gets alone, whatever else runs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from attar.errors import DataError, SettingsError
from attar.runtime.admission import BusyError, Limits
from attar.runtime.engine import Engine
from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.kv.compose import REFUSED
from attar.runtime.results import Event, Result, gather_result
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.penalties import TokenHistory
from attar.runtime.sampling.sample import noise_key, sample
from attar.runtime.sampling.warp import SamplingRow
from attar.runtime.scheduler import Scheduler
from tests.runtime.fake_runner import VOCABULARY, FakeRunner, logits_after

END = 49


def letters(ids: Sequence[int], skip_special: bool) -> str:
    """Token t is a letter; the end token is special."""
    return "".join("<end>" if i == END else chr(ord("A") + i) for i in ids if not (skip_special and i == END))


def engine(runner: FakeRunner | None = None, *, limits: Limits | None = None, **options: object) -> Engine:
    runner = runner or FakeRunner()
    manager = BlockManager(runner.capacity, runner.block_size)
    scheduler = Scheduler(manager, limits, context=runner.context, memory=runner)
    return Engine(runner, scheduler, ends=(END,), decode=letters, **options)  # type: ignore[arg-type]


def finish(running: Engine) -> list[Event]:
    events = []
    for _ in range(10_000):
        if running.idle:
            return events
        events += running.step()
    raise AssertionError("the engine does not come to an end")


def results(events: list[Event], asked: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, Result]:
    return {
        name: gather_result(
            None, prompt, [e for e in events if e.request == name], params.logprobs is not None
        )
        for name, (prompt, params) in asked.items()
    }


def alone(prompt: list[int], params: SamplingParams, sample_index: int = 0) -> list[int]:
    """The tokens by definition: no cache, no batch, no scheduler."""
    tokens: list[int] = []
    assert params.seed is not None and params.max_tokens is not None
    while len(tokens) < params.max_tokens:
        row = SamplingRow(
            params, TokenHistory(prompt, tokens), (END,) if len(tokens) < params.min_tokens else ()
        )
        key = noise_key(params.seed, sample_index, len(prompt) + len(tokens))
        tokens += sample(logits_after(prompt + tokens)[None], [row], [key])
        if tokens[-1] == END and not params.ignore_eos:
            break
    return tokens


def test_one_request() -> None:
    running = engine()
    params = SamplingParams(seed=1, max_tokens=12)
    name = running.add([1, 2, 3], params)
    result = results(finish(running), {name: ([1, 2, 3], params)})[name]
    assert list(result.token_ids) == alone([1, 2, 3], params)
    assert result.text == letters(result.token_ids, True)
    assert result.usage.prompt_tokens == 3 and result.usage.completion_tokens == len(result.token_ids)
    assert running.idle


def random_params(draws: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=draws.choice([0.0, 0.7, 1.0]),
        top_k=draws.choice([0, 5]),
        top_p=draws.choice([1.0, 0.8]),
        max_tokens=draws.randint(1, 20),
        n=draws.choice([1, 1, 1, 2, 4]),
        seed=draws.randrange(1000),
        ignore_eos=draws.random() < 0.5,
        frequency_penalty=draws.choice([0.0, 0.5]),
        repetition_penalty=draws.choice([1.0, 1.2]),
        logprobs=draws.choice([None, 2]),
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("blocks", [14, 200])
def test_every_text_is_the_one_it_would_be_alone(seed: int, blocks: int) -> None:
    """Mixed requests that come over time, share prefixes, are chunked, and (with few blocks) preempted."""
    draws = random.Random(seed)
    running = engine(FakeRunner(blocks), limits=Limits(step_tokens=16, sequences=6))
    stems = [[draws.randrange(VOCABULARY) for _ in range(24)] for _ in range(2)]
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    events: list[Event] = []
    for _ in range(25):
        prompt = [*draws.choice(stems)[: draws.randint(1, 24)], draws.randrange(VOCABULARY)]
        params = random_params(draws)
        asked[running.add(prompt, params)] = (prompt, params)
        for _ in range(draws.randint(0, 3)):
            events += running.step()
            running.check()
    events += finish(running)
    for name, result in results(events, asked).items():
        prompt, params = asked[name]
        assert len(result.samples) == params.n
        for index, text in enumerate(result.samples):
            assert list(text.token_ids) == alone(prompt, params, index), (name, index)
            assert text.text == letters(text.token_ids, True)
            assert text.finish_reason == (
                "stop" if text.token_ids[-1] == END and not params.ignore_eos else "length"
            )
    if blocks == 14:
        assert running.scheduler.preemptions > 0
    assert running.scheduler.manager.stats.hit > 0


def test_events_join_to_the_result_and_end_once() -> None:
    running = engine()
    name = running.add([5], SamplingParams(seed=3, n=3, max_tokens=6, ignore_eos=True))
    events = finish(running)
    for index in range(3):
        mine = [event for event in events if event.sample == index]
        assert [event.finished for event in mine] == [False] * (len(mine) - 1) + [True]
    assert [event.usage is not None for event in events] == [False] * (len(events) - 1) + [True]
    usage = events[-1].usage
    assert usage is not None and usage.completion_tokens == 18 and usage.total_tokens == 19
    assert {event.request for event in events} == {name}


def test_stop_strings_and_ids() -> None:
    free = SamplingParams(seed=5, max_tokens=20, ignore_eos=True)
    text = letters(alone([7], free), False)
    for params, shown, why in [
        (replace(free, stop=(text[4:7],)), text[: text.index(text[4:7])], text[4:7]),
        (replace(free, stop_ids=(ord(text[6]) - 65,)), text[: text.index(text[6])], ord(text[6]) - 65),
        (replace(free, stop=("zzz",)), text, None),
    ]:
        running = engine()
        name = running.add([7], params)
        result = results(finish(running), {name: ([7], params)})[name]
        assert (result.text, result.samples[0].stop_reason) == (shown, why)
        assert result.finish_reason == ("length" if why is None else "stop")
        assert running.scheduler.manager.free + running.scheduler.manager.cached == 64


def test_min_tokens_puts_off_every_end() -> None:
    params = SamplingParams(seed=2, max_tokens=30, min_tokens=15, logit_bias={END: 6.0})
    assert len(alone([3], replace(params, min_tokens=0))) < 15
    running = engine()
    name = running.add([3], params)
    tokens = results(finish(running), {name: ([3], params)})[name].token_ids
    assert list(tokens) == alone([3], params) and len(tokens) >= 16 - 1
    assert END not in tokens[:15]


def test_logprobs_are_the_model_s_own() -> None:
    params = SamplingParams(seed=4, temperature=0.3, top_k=2, max_tokens=5, logprobs=3, prompt_logprobs=1)
    running = engine()
    prompt = [9, 8, 7, 6, 5, 4]
    name = running.add(prompt, params)
    result = results(finish(running), {name: (prompt, params)})[name]
    tokens = list(result.token_ids)
    assert result.logprobs is not None and result.prompt_logprobs is not None
    assert [logprob.token for logprob in result.logprobs] == tokens
    for index, logprob in enumerate(result.logprobs):
        expected = logits_after(prompt + tokens[:index]).log_softmax(-1)
        assert logprob.logprob == pytest.approx(float(expected[logprob.token]))
        assert [token for token, _ in logprob.top] == expected.topk(3).indices.tolist()
    first, *others = result.prompt_logprobs
    assert first is None and len(others) == 5
    for index, one in enumerate(others, 1):
        assert one is not None and one.token == prompt[index]
        assert one.logprob == pytest.approx(
            float(logits_after(prompt[:index]).log_softmax(-1)[prompt[index]])
        )


def test_prompt_logprobs_read_no_prefix_and_survive_chunks() -> None:
    running = engine(limits=Limits(step_tokens=3, sequences=3))
    prompt = list(range(20))
    plain = running.add(prompt, SamplingParams(max_tokens=1))
    finish(running)
    name = running.add(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))
    event = finish(running)[0]
    assert event.request == name != plain
    assert event.prompt_logprobs is not None and len(event.prompt_logprobs) == 20
    assert event.usage is not None and event.usage.cached_tokens == 0


def test_a_prefix_is_read_from_the_cache() -> None:
    running = engine()
    prompt = list(range(20))
    running.add(prompt, SamplingParams(max_tokens=1))
    finish(running)
    before = running.runner.ran  # type: ignore[attr-defined]
    running.add(prompt, SamplingParams(max_tokens=1))
    usage = finish(running)[-1].usage
    assert usage is not None and usage.cached_tokens == 16
    assert running.runner.ran - before == 4  # type: ignore[attr-defined]


def test_cancelled_before_during_and_after() -> None:
    running = engine()
    params = SamplingParams(n=3, max_tokens=50, ignore_eos=True)
    waiting = running.add([1], params)
    assert [e.finish_reason for e in running.cancel(waiting)] == ["cancelled"] * 3
    name = running.add([1], params)
    for _ in range(4):
        running.step()
    events = running.cancel(name)
    assert sorted(event.sample for event in events) == [0, 1, 2]
    assert events[-1].usage is not None and events[-1].usage.completion_tokens == 12
    assert running.cancel(name) == [] == running.cancel("unknown")
    assert running.idle
    running.check()


def test_deadline() -> None:
    now = [0.0]
    running = engine(clock=lambda: now[0])
    name = running.add([1, 2], SamplingParams(max_tokens=50, ignore_eos=True), deadline_s=5.0)
    running.step()
    now[0] = 6.0
    (event,) = finish(running)
    assert (event.request, event.finish_reason) == (name, "deadline")
    assert event.usage is not None and event.usage.total_s == 6.0 and event.usage.first_token_s == 0.0


def test_a_step_that_fails_ends_its_requests_and_the_engine_lives() -> None:
    runner = FakeRunner()
    running = engine(runner)
    running.add([1, 2], SamplingParams(n=2))
    runner.fails = ValueError("broken")
    events = finish(running)
    assert [(e.finish_reason, e.error) for e in events] == [("error", "ValueError: broken")] * 2
    assert all(event.failure is runner.fails for event in events)
    runner.fails = None
    params = SamplingParams(seed=0, max_tokens=3)
    name = running.add([1, 2], params)
    assert list(results(finish(running), {name: ([1, 2], params)})[name].token_ids) == alone([1, 2], params)


def test_a_fork_that_fails_ends_all_texts_of_its_request_and_leaks_nothing() -> None:
    class Forgetful(FakeRunner):
        def fork(self, sequence: int, child: int) -> None:
            if len(forks) == 1:  # the first request has forked already
                raise MemoryError("no room for scores")
            forks.append(child)

    forks: list[int] = []
    running = engine(Forgetful())
    params = SamplingParams(n=2, max_tokens=3, seed=1)
    first, second = (running.add(prompt, params) for prompt in ([1, 2], [3, 4]))
    events = finish(running)
    broken = [(e.finish_reason, e.error) for e in events if e.request == second]
    assert broken == [("error", "MemoryError: no room for scores")] * 2
    texts = results([e for e in events if e.request == first], {first: ([1, 2], params)})[first].samples
    assert [list(text.token_ids) for text in texts] == [alone([1, 2], params, index) for index in (0, 1)]
    running.check()


def test_one_row_of_nan_ends_one_request() -> None:
    runner = FakeRunner()
    runner.poison = {33}
    running = engine(runner)
    params = SamplingParams(seed=0, max_tokens=4, logit_bias={33: -100.0})
    asked = {running.add(prompt, params): (prompt, params) for prompt in ([1, 2], [1, 33], [5])}
    got = results(finish(running), asked)
    assert [item.finish_reason for item in got.values()].count("error") == 1
    assert "NaN" in (got["1"].samples[0].error or "")
    assert list(got["0"].token_ids) == alone([1, 2], params)


def test_what_can_never_run_is_refused_by_name() -> None:
    running = engine(limits=Limits(waiting=1))
    with pytest.raises(DataError, match="empty"):
        running.add([])
    with pytest.raises(DataError, match="token 50 at position 1"):
        running.add([1, 50])
    with pytest.raises(SettingsError, match="context"):
        running.add([1] * 200)
    with pytest.raises(SettingsError, match="logit_bias"):
        running.add([1], SamplingParams(logit_bias={50: 1.0}))
    with pytest.raises(SettingsError, match="regex"):
        running.add([1], SamplingParams(regex="a"))
    running.add([1], id="a")
    with pytest.raises(SettingsError, match="id is 'a'"):
        running.add([1], id="a")
    with pytest.raises(BusyError):
        running.add([1])
    assert len(finish(running)) > 0


def test_several_texts_are_refused_where_the_runner_cannot_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REFUSED, ("h2o", "fork"), "because")
    runner = FakeRunner()
    runner.features = {"dense": None, "h2o": ("eviction", "h2o")}  # type: ignore[attr-defined]
    running = engine(runner)
    running.add([1])
    with pytest.raises(
        SettingsError, match="n is 2, but must be something else with eviction='h2o': because"
    ):
        running.add([1], SamplingParams(n=2))


def test_the_context_is_never_passed() -> None:
    runner = FakeRunner(context=10)
    running = engine(runner)
    name = running.add([1] * 7, SamplingParams(max_tokens=None, ignore_eos=True))
    events = finish(running)
    assert sum(len(event.token_ids) for event in events) == 3
    assert events[-1].finish_reason == "length" and events[-1].request == name


def test_padding_columns_are_never_drawn() -> None:
    running = engine(vocabulary=3)
    running.add([1], SamplingParams(seed=0, max_tokens=40))
    assert {token for event in finish(running) for token in event.token_ids} <= {0, 1, 2}


def test_logits_are_not_modified() -> None:
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Remembers(FakeRunner):
        def run(self, step):  # type: ignore[no-untyped-def]
            logits = super().run(step)
            kept.append((logits, logits.clone()))
            return logits

    running = engine(Remembers())
    running.add([1], SamplingParams(seed=0, temperature=0.5, top_k=3, top_p=0.5, repetition_penalty=2.0))
    finish(running)
    assert all(torch.equal(a, b) for a, b in kept)


def test_an_idle_engine_checks_its_blocks_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attar.runtime.engine.CHECK_S", 10.0)
    now, looked = [0.0], []
    running = engine(clock=lambda: now[0])
    check = running.check
    monkeypatch.setattr(running, "check", lambda: looked.append(now[0]) or check())

    def work() -> None:
        running.add([1], SamplingParams(max_tokens=2))
        assert running.check_idle() is None  # it is not idle
        finish(running)

    assert running.check_idle() is None and looked == []
    work()
    assert looked == []  # not in the step
    assert running.check_idle() is None and looked == [0.0]
    assert running.check_idle() is None and looked == [0.0]  # nothing ran since
    now[0] = 4.0
    work()
    assert running.check_idle() == 6.0 and looked == [0.0]
    now[0] = 10.0
    assert running.check_idle() is None and looked == [0.0, 10.0]
    running.add([1])
    running.scheduler.manager.admit(99, [1, 2])
    running.scheduler.manager.reserve(99, 2)
    finish(running)
    with pytest.raises(AssertionError, match="1 blocks leaked"):
        running.check_idle()
