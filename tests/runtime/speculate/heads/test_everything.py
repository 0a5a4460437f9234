"""A head that reads hidden states, in all that an engine does at once, on real runners.

Chunks, shared prefixes, several completions of a prompt, preemption, cancellation, steps that fail and are
run again, resting passes, trees whose accepted path moves, seeds and penalties and a grammar: the text is
that of plain decoding, and every state that the head is given is that of a forward over the text alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from attar.models.hidden_states import recording_states
from attar.runtime.admission import Limits
from attar.runtime.llm import LLM
from attar.runtime.loading import Loaded
from attar.runtime.runner.compiled import compiled
from attar.runtime.runner.device.runner import device_runner
from attar.runtime.runner.from_model import shared_copy
from attar.runtime.runner.modules import Modules
from attar.runtime.sampling.grammar import MaskTime
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.heads.chain import ChainProposer
from attar.runtime.speculate.heads.context import ContextReader
from attar.runtime.speculate.speculator import Speculator
from tests import tiny_models
from tests.cases import mostly_slow
from tests.compiler import no_compiler
from tests.runtime.speculate.heads.hashing import HashingHead, RestlessPolicy, StatesOfTexts, check_pool

LAYERS = (0, 2, 3)  # of three: after the first and the last block, and after the final norm
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, seed=0)
SAMPLED = replace(GREEDY, temperature=0.8, seed=3, n=3)


class OddTokens:
    """A grammar; stands for llguidance's matcher."""

    complete, last_s = False, 0.0
    time = MaskTime()

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def copy(self) -> OddTokens:
        return OddTokens(self.vocabulary)

    def after(self, tokens: Sequence[int]) -> OddTokens:
        return self

    def allowed(self, ends: Sequence[int] = ()) -> torch.Tensor:
        return torch.arange(self.vocabulary) % 2 == 1

    def consume(self, token: int) -> None:
        assert token % 2 == 1


class OddGrammars:
    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def prepare(self) -> None:
        pass

    def matcher(self, params: SamplingParams, tenant: str = "") -> OddTokens | None:
        return None if params.guide is None else OddTokens(self.vocabulary)


@cache
def model_of(family: str, vocabulary: int = tiny_models.VOCABULARY):
    model = tiny_models.build(family, vocab_size=vocabulary)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return model


@cache
def requests_of(
    family: str, vocabulary: int = tiny_models.VOCABULARY
) -> list[tuple[list[int], SamplingParams]]:
    rows = tiny_models.tokens(model_of(family, vocabulary), batch=6, length=60, seed=5).tolist()
    shared = rows[0][:40]
    sampled = replace(SAMPLED, top_k=8)
    return [
        (shared + rows[1][:9], GREEDY),
        (shared + rows[2][:3], sampled),
        (rows[3][:7], replace(sampled, n=1, repetition_penalty=1.3, frequency_penalty=0.4)),
        (shared[:33], replace(GREEDY, regex="odd")),
        (rows[4][:50], GREEDY),
        ([rows[5][0]], sampled),
    ]


class FailingSteps:
    """A runner some of whose steps fail when they have been run, where several sequences are in them."""

    def __init__(self, runner, seed=0) -> None:
        self.runner, self.random, self.failed = runner, random.Random(seed), 0

    def __getattr__(self, name):
        return getattr(self.runner, name)

    def run(self, step):
        logits = self.runner.run(step)
        again = self.repeats and step.repeatable(self.block_size)
        if again and len(step.spans) > 1 and self.random.random() < 0.15:
            self.failed += 1
            raise RuntimeError("the step failed")
        return logits


def runner_of(family: str, kind: str, vocabulary: int = tiny_models.VOCABULARY, **options):
    model = model_of(family, vocabulary)
    if kind == "modules":
        return Modules(shared_copy(model), **options)
    if kind == "device":
        return device_runner(model.config, model.state_dict(), **options)
    return compiled(model.config, model.state_dict(), threads=1, bits=16, **options)


def llm_of(runner, speculator=None, prefix_cache=None, **limits) -> LLM:
    lookback = getattr(runner, "lookback", (runner.window, 0))
    loaded, bounds = Loaded(runner, lookback=lookback), Limits(**limits)
    llm = LLM.of(loaded, limits=bounds, prefix_cache=prefix_cache, speculator=speculator)
    llm.engine.grammars = OddGrammars(runner.vocabulary)
    return llm


def complete(llm: LLM, requests, each_step=lambda: None, cancel: bool = False) -> dict[int, list[list[int]]]:
    """The completions of every request; they come one after the other, and one is cancelled."""
    engine, got, names = llm.engine, {}, {}
    waiting = list(enumerate(requests))
    steps = 0
    while waiting or not engine.idle:
        if waiting and steps % 3 == 0:
            index, (prompt, params) = waiting.pop(0)
            names[engine.add(prompt, params)] = index
            got[index] = [[] for _ in range(params.n)]
        for event in engine.step():
            assert event.error is None, event.error
            got[names[event.request]][event.sample] += event.token_ids
        each_step()
        steps += 1
        if cancel and steps == 14:
            engine.cancel(next(name for name, index in names.items() if index == 0))
            del got[0]
    engine.check()
    return got


@torch.no_grad()
def states_of(family: str, text: list[int]) -> torch.Tensor:
    """(n, m, H)."""
    model = model_of(family)
    with recording_states(model, LAYERS) as states:
        model(input_ids=torch.tensor([text]))
    return torch.stack([state[0] for state in states], 1).float()


CASES = [
    ("llama3", "modules", {"blocks": 30, "block_size": 4}, 0.02),
    ("mistral", "modules", {"blocks": 18, "block_size": 4}, 0.02),
    ("gpt2", "modules", {"blocks": 30, "block_size": 4}, 0.02),
    ("llama3", "modules", {"blocks": 30, "block_size": 4, "kv_dtype": "int8"}, 0.06),
    ("llama3", "compiled", {"blocks": 10, "kv_dtype": "float32"}, 0.02),
    ("mistral", "compiled", {"blocks": 7, "kv_dtype": "float16"}, 0.02),
    ("llama3", "compiled", {"blocks": 10, "kv_dtype": "int8"}, 0.06),
    ("llama3", "device", {"blocks": 10, "kv_dtype": "float32"}, 0.02),
    ("mistral", "device", {"blocks": 7, "kv_dtype": "int8"}, 0.06),
]


def known_of(family, requests, plain, bound: float) -> StatesOfTexts:
    texts = [requests[index][0] + text for index, every in plain.items() for text in every]
    return StatesOfTexts(texts, lambda text: states_of(family, text), bound)


def hashing_speculator(runner, known: StatesOfTexts) -> Speculator:
    head = HashingHead(known, tiny_models.VOCABULARY)
    context = ContextReader(runner.keep_hidden(LAYERS), runner.block_size)
    proposer = ChainProposer(head, context, name="hash", branches=3)
    return Speculator(proposer, RestlessPolicy(), most=12, verification="coupled")


@pytest.mark.parametrize(("family", "kind", "options", "bound"), mostly_slow(CASES, CASES[4:5]))
def test_the_text_and_every_state(family, kind, options, bound) -> None:
    if kind == "compiled" and no_compiler():
        pytest.skip("no C++ compiler")
    requests = requests_of(family)
    wide = {**options, "blocks": 160 * 4 // options.get("block_size", 16)}
    plain = complete(llm_of(runner_of(family, kind, **wide)), requests)
    known = known_of(family, requests, plain, bound)
    runner = FailingSteps(runner_of(family, kind, **options))
    speculator = hashing_speculator(runner, known)
    head, policy, pool = speculator.proposer.head, speculator.policy, speculator.proposer.context.pool
    llm = llm_of(runner, speculator, step_tokens=40, chunk=9, sequences=8)
    moved, move = [], runner.runner.move
    runner.move = lambda pairs: moved.extend(pairs) or move(pairs)
    checked = []

    def each_step() -> None:
        checked.append(check_pool(llm.engine, pool, known))

    for turn in range(2):  # the second finds prefixes that the first has written
        got = complete(llm, requests, each_step, cancel=turn == 0)
        assert got == {index: plain[index] for index in got}
    assert speculator.failure is None
    scheduler = llm.engine.scheduler
    seen = (sum(checked), speculator.counts.accepted, policy.rested, head.rounds)
    assert min(seen) > 15, f"checked, accepted, rested, rounds: {seen}"
    assert scheduler.preemptions and scheduler.manager.stats.hit
    assert moved and (runner.failed or not runner.repeats)
    assert not head.held, "what ended is forgotten"


@pytest.mark.slow
def test_kivi() -> None:
    """Full blocks are quantized: what a token reads depends on when its block was full, so that plain
    decoding has the same text only where nothing is shared, cut or run again."""
    requests = [(prompt, replace(params, n=1)) for prompt, params in requests_of("llama3")]
    options = {"blocks": 40, "block_size": 32, "kv_dtype": "kivi4"}
    plain = complete(llm_of(runner_of("llama3", "modules", **options), prefix_cache=False), requests)
    runner = runner_of("llama3", "modules", **options)
    speculator = hashing_speculator(runner, known_of("llama3", requests, plain, 0.3))
    llm = llm_of(runner, speculator, prefix_cache=False)
    assert complete(llm, requests) == plain
    assert speculator.failure is None and speculator.counts.accepted > 10
