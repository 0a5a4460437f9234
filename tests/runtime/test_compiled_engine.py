"""The compiled and the device runner under the whole engine: the tokens are those of plain transformers,
whatever happens to the sequences on the way."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from attar.runtime.admission import Limits
from attar.runtime.llm import LLM
from attar.runtime.loading import Loaded
from attar.runtime.runner.compiled import compiled
from attar.runtime.runner.device.runner import device_runner
from attar.runtime.sampling.params import SamplingParams
from tests import tiny_models
from tests.compiler import needs_compiler
from tests.marks import slow_but
from tests.runtime.driving import greedy

pytestmark = needs_compiler

COUNT = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama3", "mistral", "gemma2"])
def model(request):
    """With a window of 8 in no layer, in all and in some; weights that bfloat16 holds."""
    built = tiny_models.build(request.param)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return built


@pytest.fixture(scope="module")
def prompts(model):
    rows = tiny_models.tokens(model, batch=5, length=60, seed=3)
    first = rows[0].tolist()
    return [first, first[:40] + rows[1].tolist()[:20], rows[2].tolist()[:7], first[:33], rows[3].tolist()]


@pytest.fixture(scope="module")
def wanted(model, prompts):
    return [greedy(model, prompt, COUNT) for prompt in prompts]


@pytest.fixture(autouse=True, params=slow_but(("compiled", "device"), "compiled"))
def made(request, monkeypatch):
    """What ``llm`` runs: the device runner has the same tests."""
    settings = {"threads": 2, "bits": 16} if request.param == "compiled" else {}
    make = partial(compiled if request.param == "compiled" else device_runner, **settings)
    monkeypatch.setitem(globals(), "MAKE", make)
    return request.param


MAKE = partial(compiled, threads=2, bits=16)


def llm(model, blocks=64, **limits):
    runner = MAKE(model.config, model.state_dict(), blocks=blocks, kv_dtype="float32")
    lookback = (runner.window, 0)
    return LLM.of(Loaded(runner, lookback=lookback), limits=Limits(**limits))


def tokens(results):
    return [list(result.token_ids) for result in results]


@pytest.mark.few(1)
def test_mixed_batches_and_chunks(model, prompts, wanted):
    engine = llm(model, step_tokens=32, sequences=4, chunk=10)
    assert tokens(engine.generate(prompts, GREEDY)) == wanted
    engine.engine.check()


@pytest.mark.few(1)
def test_prefix_hits(model, prompts, wanted):
    """A second round reads whole blocks of the first, also where only the beginning is the same."""
    engine = llm(model)
    events = []
    for prompt in (prompts[0], prompts[1], prompts[3], prompts[0]):
        events.append([*engine.stream(prompt, GREEDY)])
    results = [[token for event in item for token in event.token_ids] for item in events]
    assert results == [wanted[0], wanted[1], wanted[3], wanted[0]]
    if engine.engine.scheduler.manager.window is None:
        assert [item[-1].usage.cached_tokens for item in events] == [0, 32, 32, 48]
    engine.engine.check()


@pytest.mark.few(1)
def test_preemption(model, prompts, wanted):
    """A pool that holds two texts for five: some are thrown out and computed again."""
    engine = llm(model, blocks=12, step_tokens=64, sequences=5)
    assert tokens(engine.generate(prompts, GREEDY)) == wanted
    if engine.engine.scheduler.manager.window is None:  # with a window behind which blocks go back all fit
        assert engine.engine.scheduler.preemptions > 0
    engine.engine.check()


@pytest.mark.few(1)
def test_an_aborted_text_leaves_the_others_alone(model, prompts, wanted):
    engine = llm(model)
    left = engine.stream(prompts[4], GREEDY)
    next(left)
    first = engine.engine.add(prompts[2], GREEDY)
    engine.engine.step()
    engine.engine.cancel(first)
    assert tokens(engine.generate(prompts[:2], GREEDY)) == wanted[:2]
    left.close()
    assert engine.engine.idle
    engine.engine.check()


@pytest.mark.few(1)
def test_several_texts_of_one_prompt(model, prompts, wanted):
    """They share the prompt's blocks until they part: greedy ones are all the same, drawn ones are those of
    a text alone."""
    engine = llm(model)
    many = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, n=3)
    (result,) = engine.generate([prompts[1]], many)
    assert [list(sample.token_ids) for sample in result.samples] == [wanted[1]] * 3
    drawn = SamplingParams(temperature=1.0, seed=5, max_tokens=COUNT, ignore_eos=True, n=2)
    one, two = engine.generate([prompts[0]], drawn)[0].samples
    alone = SamplingParams(temperature=1.0, seed=5, max_tokens=COUNT, ignore_eos=True)
    assert one.token_ids == llm(model).generate([prompts[0]], alone)[0].token_ids != two.token_ids
    engine.engine.check()


@pytest.mark.few(1)
@pytest.mark.parametrize("made", ["compiled"], indirect=True)
@pytest.mark.parametrize("bits", [8, 16])
def test_drafts_chunks_and_batches_change_no_token(bits):
    """Integer products of either width: a token has the same numbers alone and in company."""
    settings = {"weights": "int4", "activations": bits, "kv_tokens": 2048}
    ids = [[2, 40, 41, 42, 40, 41, 42, 40], list(range(50, 90)), [7]]
    alone = LLM("attar:tiny", **settings)
    wanted = [tokens(alone.generate([prompt], GREEDY))[0] for prompt in ids]
    drafting = LLM(
        "attar:tiny",
        speculate="ngram",
        drafts=6,
        **settings,
        limits=Limits(step_tokens=32, sequences=4, chunk=10),
    )
    assert tokens(drafting.generate(ids, GREEDY)) == wanted
    drafts = drafting.engine.speculator
    assert drafts is not None
    assert tokens([drafting.generate([prompt], GREEDY)[0] for prompt in ids]) == wanted
    drafting.engine.check()


def test_the_window_behind_which_blocks_go_back(model):
    """Only where every layer has one."""
    runner = llm(model).engine.runner
    assert runner.window == (8 if model.config.model_type == "mistral" else None)
