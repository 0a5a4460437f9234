"""Trees of a draft model in the engine: the texts are plain decoding's, and a pass brings more of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from attar.runtime.admission import Limits
from attar.runtime.llm import LLM
from attar.runtime.loading import Loaded, load
from attar.runtime.runner.modules import Modules
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.draft import kind_of
from attar.runtime.speculate.draft_model import DraftModel
from attar.runtime.speculate.latency import Latency
from attar.runtime.speculate.loss_budget import LossBudget
from attar.runtime.speculate.policy import DraftPolicy
from attar.runtime.speculate.self_speculation import load_self_draft
from attar.runtime.speculate.speculator import Speculator
from attar.runtime.speculate.verify import VerificationMode
from tests import tiny_models
from tests.runtime.driving import Driver
from tests.runtime.speculate.proposing import Eager

FAST = ("llama3", "gpt2")
CODE = ["def __init__(self, name):\n    self.name = name\n", "import os\nimport sys\n\n", "x = [1, 2]\n", "#"]
COUNT = 24


class Every(Eager):
    """Chains of three and all siblings, as far as there is free."""

    def choose(self, sequences, limits, prompt_tokens=0, branches=1):
        siblings = [kind_of(rank, depth) for depth in range(1, 4) for rank in range(1, 4)]
        kinds = [kind_of(0, depth) for depth in range(1, 4)] + siblings
        return [set(kinds[:limit]) for limit in limits]


def speculator(draft: DraftModel, mode: VerificationMode | None = None) -> Speculator:
    return Speculator(draft, Every(), most=12, verification=mode)


@cache
def plain_model(family: str) -> Any:
    return tiny_models.build(family)


@cache
def neighbour(family: str) -> Any:
    """A model that mostly agrees."""
    result = copy.deepcopy(plain_model(family))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in result.parameters():
            parameter += 0.08 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return result


def runner(model: Any) -> Modules:
    return Modules(copy.deepcopy(model), blocks=160, block_size=4)


def answers(family: str, asked: Sequence[Any], params: Any, branches: int = 0) -> tuple[Any, Any]:
    drafter = None
    if branches:
        drafter = speculator(DraftModel(runner(neighbour(family)), branches=branches))
    loaded = Loaded(runner(plain_model(family)))
    llm = LLM.of(loaded, speculator=drafter, limits=Limits(sequences=8))
    results = [result.token_ids for result in llm.generate(asked, params)]
    llm.engine.check()
    if drafter is not None:
        assert drafter.failure is None
        drafter.proposer.check()  # type: ignore[attr-defined]
    return results, drafter and drafter.counts


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    "family", [f if f in FAST else pytest.param(f, marks=pytest.mark.slow) for f in tiny_models.DECODERS]
)
def test_texts_of_families(family: str, temperature: float) -> None:
    """Greedy and coupled, batch 1 and 8; a pass brings no less with siblings."""
    model = plain_model(family)
    asked = [tiny_models.tokens(model, length=5 + 3 * n, seed=n)[0].tolist() for n in range(8)]
    params = [
        SamplingParams(temperature=temperature, top_k=30, seed=n, max_tokens=COUNT, ignore_eos=True)
        for n in range(8)
    ]
    want, _ = answers(family, asked, params)
    brought = []
    for branches in (1, 2, 4):
        actual, counts = answers(family, asked, params, branches)
        assert actual == want
        brought.append(counts.accepted / counts.drafts)
        assert answers(family, asked[:1], params[:1], branches)[0] == want[:1]
    assert brought[0] <= brought[1] <= brought[2], brought


class Timed(DraftPolicy):
    """A policy with given times of passes, which learns only what is accepted."""

    def __init__(self, slope: float) -> None:
        latency = Latency({1: 1.0, 32: 1.0 + 31 * slope}, {1: 0.01})
        super().__init__(latency, 12, LossBudget(math.inf))

    def note(self, news, seconds, drafting=0.0, prompt_tokens=0, steps=0, prefilled=False):
        for new in news:
            self._learn(new)


@pytest.mark.slow
@pytest.mark.parametrize("slope", [0.001, 1.0])
def test_siblings_come_by_themselves_where_they_pay(slope: float) -> None:
    draft = DraftModel(runner(neighbour("gpt2")))
    drafter = Speculator(draft, Timed(slope), most=12)
    llm = LLM.of(Loaded(runner(plain_model("gpt2"))), speculator=drafter)
    asked = [tiny_models.tokens(plain_model("gpt2"), length=9, seed=n)[0].tolist() for n in range(4)]
    for n, prompt in enumerate(asked):
        llm.generate(prompt, SamplingParams(temperature=0.9, seed=n, max_tokens=90, ignore_eos=True))
    counts = drafter.counts
    assert drafter.failure is None
    assert (counts.drafted > 4 * counts.drafts) == (slope < 0.1), counts
    assert (counts.drafted <= 3 * counts.drafts) == (slope > 0.1), counts


def test_keys_and_values_behind_an_accepted_sibling_are_a_plain_run_s() -> None:
    target = runner(plain_model("llama3"))
    drafter = speculator(DraftModel(runner(neighbour("llama3"))))
    running = LLM.of(Loaded(target), speculator=drafter).engine
    prompt = tiny_models.tokens(plain_model("llama3"), length=9)[0].tolist()
    running.add(prompt, SamplingParams(temperature=0.9, seed=4, max_tokens=60, ignore_eos=True))
    moved: list[Any] = []
    target.move = lambda pairs, move=target.move: (moved.extend(pairs), move(pairs))  # type: ignore[method-assign]
    while not running.scheduler.running or len(running.scheduler.running[0].tokens) < 50:
        running.step()
    (sequence,) = running.scheduler.running
    assert len(moved) > 3 and drafter.failure is None
    driver = Driver(runner(plain_model("llama3")))
    alone = driver.add(sequence.tokens[: sequence.computed])
    driver.run((alone, None))
    table = running.scheduler.manager.table(sequence.id).row
    for layer in range(3):
        ours = target.pool.gather(layer, table, sequence.computed)
        theirs = driver.runner.pool.gather(layer, alone.blocks, sequence.computed)
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.allclose(mine, other, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_a_small_draft_of_attar_tiny_brings_more_with_siblings(batch: int) -> None:
    """Part of its own layers; texts are the same with any number of branches, passes fewer."""
    asked = [f"{CODE[n % 4]}{n}" for n in range(batch)]
    for temperature in (0.0, 0.8):
        params = [
            SamplingParams(temperature=temperature, seed=n, max_tokens=240 // batch + 16, ignore_eos=True)
            for n in range(batch)
        ]
        want = [param.token_ids for param in LLM("attar:tiny", kv_tokens=4096).generate(asked, params)]
        gains = []
        for branches in (1, 2, 4):
            target = load("attar:tiny", kv_tokens=4096)
            draft = load_self_draft("attar:tiny", target, way="layers", share=0.75, branches=branches)
            drafter = speculator(draft)
            llm = LLM.of(target, speculator=drafter)
            assert [param.token_ids for param in llm.generate(asked, params)] == want
            assert drafter.failure is None
            llm.engine.check()
            gains.append(1 + drafter.counts.accepted / drafter.counts.drafts)
        assert gains[0] < gains[1] <= gains[2] and gains[2] > (1 + temperature / 16) * gains[0], gains


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 8])
def test_five_hundred_tokens_in_float32(batch: int) -> None:
    asked = [f"{CODE[n % 4]}{n}" for n in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
    shared: dict[str, Any] = {"kv_tokens": 16384, "dtype": "float32", "runner": "modules"}
    want = [param.token_ids for param in LLM("attar:tiny", **shared).generate(asked, params)]
    target = load("attar:tiny", **shared)
    llm = LLM.of(
        target, speculator=speculator(load_self_draft("attar:tiny", target, way="layers", share=0.75))
    )
    assert [param.token_ids for param in llm.generate(asked, params)] == want
    llm.engine.check()
