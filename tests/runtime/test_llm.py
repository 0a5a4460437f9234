"""LLM: prompts in, results out; on a runner without a model, and on attar:tiny against transformers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from attar.errors import DataError, NumericsError, SettingsError
from attar.models.loading.load import load_model, load_tokenizer
from attar.runtime.admission import Limits
from attar.runtime.kv.evict import H2O, Eviction, Reread, SnapKV, Streaming
from attar.runtime.llm import LLM
from attar.runtime.loading import Loaded
from attar.runtime.results import Event, gather
from attar.runtime.sampling.params import SamplingParams
from tests.runtime.fake_runner import FakeRunner
from tests.runtime.test_engine import alone

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = ["def __init__(self", "import os\n\n", "class Node:\n    def ", "#", "def __init__(self, name"]


def fake(runner: FakeRunner | None = None) -> LLM:
    return LLM.of(Loaded(runner or FakeRunner(), ends=(49,)))


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM("attar:tiny", kv_tokens=4096)


def test_one_result_for_each_prompt_in_order() -> None:
    prompts = [[1], [2, 3], [4]]
    params = [SamplingParams(seed=n, max_tokens=n + 1, n=n + 1) for n in range(3)]
    got = fake().generate(prompts, params)
    for prompt, item, result in zip(prompts, params, got, strict=True):
        assert result.prompt is None and list(result.prompt_token_ids) == prompt
        assert [list(text.token_ids) for text in result.samples] == [
            alone(prompt, item, n) for n in range(item.n)
        ]
        assert result.token_ids == result.samples[0].token_ids and result.text == ""


def test_one_prompt_of_ids_is_one_prompt() -> None:
    assert len(fake().generate([1, 2, 3], SamplingParams(max_tokens=1))) == 1


def test_wrong_arguments_leave_nothing_behind() -> None:
    llm = fake()
    with pytest.raises(DataError, match="empty"):
        llm.generate([[1], []])
    with pytest.raises(SettingsError, match="params"):
        llm.generate([[1], [2]], [SamplingParams()])
    with pytest.raises(DataError, match="tokenizer"):
        llm.generate("text")
    assert llm.engine.idle and not llm._events
    llm.engine.check()


def test_errors_of_the_runner_are_raised() -> None:
    runner = FakeRunner()
    llm = fake(runner)
    runner.fails = MemoryError("no room")
    with pytest.raises(MemoryError):
        llm.generate([1])
    runner.fails = None
    runner.poison = {3}
    with pytest.raises(NumericsError, match="NaN"):
        llm.generate([[1], [3]])
    assert llm.engine.idle and not llm._events


def test_an_abandoned_stream_is_cancelled_and_generate_runs_meanwhile() -> None:
    llm = fake()
    params = SamplingParams(seed=1, max_tokens=30, ignore_eos=True)
    stream = llm.stream([1, 2], params)
    first = next(stream)
    assert list(llm.generate([5], params)[0].token_ids) == alone([5], params)
    assert list(gather([first, *stream]).token_ids) == alone([1, 2], params)
    left = llm.stream([1, 2], params)
    next(left)
    left.close()
    assert llm.engine.idle and not llm._events


@cache
def plain_model() -> Any:
    return load_model("attar:tiny", dtype=torch.float32)


def reference(prompt: str, count: int) -> list[int]:
    """transformers' own greedy tokens, one prompt at a time."""
    tokenizer, model = load_tokenizer("attar:tiny"), plain_model()
    ids = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=count, do_sample=False, use_cache=True)
    return [int(token) for token in out[0, ids["input_ids"].shape[1] :]]


def test_greedy_is_that_of_transformers(tiny: LLM) -> None:
    got = tiny.generate(PROMPTS, GREEDY)
    for prompt, result in zip(PROMPTS, got, strict=True):
        assert list(result.token_ids) == reference(prompt, 24)
        ids = [*result.prompt_token_ids, *result.token_ids]
        assert tiny.decode(ids) == prompt + result.text
    again = tiny.generate(PROMPTS[0], GREEDY)[0]  # now from the prefix cache, alone
    assert again.token_ids == got[0].token_ids


def test_a_seeded_text_does_not_depend_on_the_batch(tiny: LLM) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=20)
    together = tiny.generate(PROMPTS, params)
    for prompt, result in zip(PROMPTS, together, strict=True):
        assert tiny.generate(prompt, params)[0].samples == result.samples


def test_several_texts_of_one_prompt() -> None:
    llm = LLM("attar:tiny", kv_tokens=1024)
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=20)
    one, two = llm.generate(PROMPTS[0], replace(params, n=2))[0].samples
    assert one == llm.generate(PROMPTS[0], params)[0].samples[0]
    assert one.token_ids != two.token_ids


def test_pieces_join_to_the_text(tiny: LLM) -> None:
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=60, ignore_eos=True)
    events = list(tiny.stream("s = 'é", params))
    assert gather(events).text == tiny.generate("s = 'é", params)[0].text
    text = tiny.decode([*tiny.encode("s = 'é"), *gather(events).token_ids])
    assert text == "s = 'é" + gather(events).text


def test_a_stop_string_cuts_the_text(tiny: LLM) -> None:
    whole = tiny.generate(PROMPTS[0], GREEDY)[0].text
    stop = whole[5:9]
    result = tiny.generate(PROMPTS[0], SamplingParams(temperature=0.0, stop=stop, max_tokens=24))[0]
    assert result.text == whole[: whole.index(stop)]
    assert (result.finish_reason, result.samples[0].stop_reason) == ("stop", stop)


def test_async(tiny: LLM) -> None:
    async def main() -> str:
        async with tiny.streams() as streams:
            events = [event async for event in streams.stream(tiny.encode(PROMPTS[0]), GREEDY)]
        return gather(events).text

    assert asyncio.run(main()) == tiny.generate(PROMPTS[0], GREEDY)[0].text


@pytest.mark.parametrize(("name", "value"), [("dtype", "int7"), ("kv_dtype", "int7"), ("kv_tokens", 0)])
def test_a_wrong_setting_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=name):
        LLM("attar:tiny", **{name: value})  # type: ignore[arg-type]


LONG = "import os\nimport sys\n\n\n" + "".join(f"def f{n}(a, b):\n    return a + {n}\n\n" for n in range(12))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "eviction",
    [
        Streaming(sinks=4, window=44),
        H2O(heavy=24, recent=24, slack=8),
        SnapKV(capacity=64, window=8),
        Reread(capacity=64, recent=16),
    ],
    ids=lambda each: type(each).__name__,
)
def test_eviction_bounds_what_a_sequence_holds(eviction: Eviction) -> None:
    """Greedy texts of a batch are those of each alone, and no sequence holds more places than it may."""
    limits = Limits(step_tokens=32, sequences=4)
    llm = LLM("attar:tiny", kv_tokens=2048, block_size=8, eviction=eviction, limits=limits)
    held: list[int] = []
    manager, step = llm.engine.scheduler.manager, llm.engine.step

    def watched() -> list[Event]:
        events = step()
        held.extend(sum(1 for _ in manager.table(each).held()) for each in manager.sequences)
        return events

    llm.engine.step = watched  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    together = llm.generate([LONG, LONG[:200], "def "], params)
    assert [len(result.token_ids) for result in together] == [30, 30, 30]
    assert llm.generate(LONG, params)[0].token_ids == together[0].token_ids
    whole = -(-(len(together[0].prompt_token_ids) + 30) // 8)
    if isinstance(eviction, SnapKV | Reread):  # it bounds the prompt alone, once it is read
        assert held[-1] <= -(-(64 + 30) // 8) < whole
    else:
        assert max(held) <= -(-(48 + 8 + 32) // 8) + 2 < whole
    llm.engine.check()


def test_eviction_and_what_it_does_not_go_with() -> None:
    with pytest.raises(
        SettingsError, match="prefix_cache is True, but must be something else with eviction='h2o'"
    ):
        LLM("attar:tiny", kv_tokens=256, eviction=H2O(), prefix_cache=True)
    with pytest.raises(
        SettingsError, match="eviction is 'h2o', but must be something else with kv_dtype='kivi4'"
    ):
        LLM("attar:tiny", kv_tokens=256, block_size=32, kv_dtype="kivi4", eviction=H2O())
