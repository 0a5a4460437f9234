"""Every trained proposer, and suffix trees, in all that an engine does at once.

Chunks, shared prefixes, several completions of a prompt, preemption, cancellation, steps that fail and are
run again, resting passes, seeds, penalties, a grammar, narrow caches, sliding windows: the text is that of
plain decoding, and drafts are those of a proposer that reads the whole sequence anew. Weights are random, and
tokens few, so that some drafts are accepted.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from attar.errors import SettingsError
from attar.models.draft_heads.folder import save_draft_head
from attar.models.loading.load import load_model
from attar.runtime.kv.evict import Streaming
from attar.runtime.llm import LLM
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.combined import CombinedProposer
from attar.runtime.speculate.heads.confidence_correction import ConfidenceCorrection
from attar.runtime.speculate.speculator import Speculator
from attar.runtime.step import FREED
from tests.cases import mostly_slow
from tests.compiler import no_compiler
from tests.runtime.speculate.heads.hashing import RestlessPolicy
from tests.runtime.speculate.heads.kinds import CHAINS, EVERY, TREES, head_of_kind, proposer_of
from tests.runtime.speculate.heads.test_everything import (
    FailingSteps,
    complete,
    llm_of,
    model_of,
    requests_of,
    runner_of,
)
from tests.runtime.speculate.proposing import Eager

V = 6
SETUPS = {
    "modules": ("llama3", "modules", {"blocks": 30, "block_size": 4}),
    "window": ("mistral", "modules", {"blocks": 18, "block_size": 4}),
    "int8": ("llama3", "modules", {"blocks": 30, "block_size": 4, "kv_dtype": "int8"}),
    "compiled": ("llama3", "compiled", {"blocks": 8, "kv_dtype": "float32"}),
    "compiled window": ("mistral", "compiled", {"blocks": 7, "kv_dtype": "float16"}),
    "compiled int8": ("llama3", "compiled", {"blocks": 8, "kv_dtype": "int8"}),
    "device": ("llama3", "device", {"blocks": 8, "kv_dtype": "float32"}),
    "device window": ("mistral", "device", {"blocks": 7, "kv_dtype": "int8"}),
}
FAST = [
    ("medusa tree", "modules"),
    ("eagle3 tree and suffix", "window"),
    ("eagle", "int8"),
    ("dflash", "compiled"),
    ("dspark", "compiled int8"),
    ("suffix", "compiled window"),
]


class Restless(RestlessPolicy):
    """Whatever the seeds of the sequences, a draft without a tenth of a chance ends."""

    def __init__(self) -> None:
        super().__init__()
        self.min_chance = 0.1


class ReadAnew:
    """Compares some drafts of a proposer with those of another one, which reads the whole sequence."""

    def __init__(self, proposer: Any, anew: Any) -> None:
        self.anew, self.random, self.same = anew, random.Random(0), []
        self.propose, proposer.propose = proposer.propose, self.compared

    def compared(self, requests):
        drafts = self.propose(requests)
        for request, draft in zip(requests, drafts, strict=True):
            if draft is None or FREED in request.blocks or self.random.random() < 0.5:
                continue
            (other,) = self.anew.propose([request])
            self.anew.forget(request.sequence)
            self.same.append(
                other is not None and (other.tokens, other.parents) == (draft.tokens, draft.parents)
            )
        return drafts


class SameFactors(ConfidenceCorrection):
    """The factors of another correction, which learns from what was accepted."""

    def __init__(self, correction: ConfidenceCorrection) -> None:
        super().__init__()
        self.factors = correction.factors  # type: ignore[method-assign]


def speculator_of(name: str, family: str, runner: Any) -> tuple[Speculator, ReadAnew | None]:
    case = EVERY[name]
    head = head_of_kind(case, model_of(family, V)) if case.kind else None
    proposer = proposer_of(case, head, runner)
    anew = None
    if case.kind:
        drafter = proposer.head if isinstance(proposer, CombinedProposer) else proposer
        anew = ReadAnew(drafter, proposer_of(replace(case, suffix=False), head, runner))
        if case.kind == "dspark":
            anew.anew.correction = SameFactors(drafter.correction)
    speculator = Speculator(proposer, Restless(), most=10)
    speculator.policy.prefill_pays = lambda *_: True  # type: ignore[method-assign]  # however few are accepted
    return speculator, anew


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "setup"), mostly_slow([(name, setup) for name in EVERY for setup in SETUPS], FAST)
)
def test_the_text_is_that_of_plain_decoding(name, setup):
    family, kind, options = SETUPS[setup]
    if kind == "compiled" and no_compiler():
        pytest.skip("no C++ compiler")
    requests = requests_of(family, V)
    wide = {**options, "blocks": 160 * 4 // options.get("block_size", 16)}
    plain = complete(llm_of(runner_of(family, kind, V, **wide)), requests)
    runner = FailingSteps(runner_of(family, kind, V, **options))
    speculator, anew = speculator_of(name, family, runner.runner)
    llm = llm_of(runner, speculator, step_tokens=40, chunk=9, sequences=8)
    moved, move = [], runner.runner.move
    runner.move = lambda pairs: moved.extend(pairs) or move(pairs)
    for turn in range(2):  # the second finds prefixes that the first has written
        got = complete(llm, requests, cancel=turn == 0)
        assert got == {index: plain[index] for index in got}
    assert speculator.failure is None
    scheduler, counts = llm.engine.scheduler, speculator.counts
    assert counts.drafted > counts.accepted > 10 and speculator.policy.rested
    assert scheduler.preemptions and scheduler.manager.stats.hit
    assert runner.failed or not runner.repeats
    assert moved or not ("tree" in name or "suffix" in name), "a path that is no beginning was accepted"
    if anew is not None and "window" not in setup:
        assert EVERY[name].suffix or len(anew.same) > 10, "where trees promise more, a head is not asked"
        assert sum(anew.same) >= 0.97 * len(anew.same), anew.same


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(EVERY, ("dspark",)))
def test_kivi(name):
    """See ``test_everything.py``: nothing is shared, cut or run again."""
    requests = [(prompt, replace(params, n=1)) for prompt, params in requests_of("llama3", V)]
    options = {"blocks": 40, "block_size": 32, "kv_dtype": "kivi4"}
    plain = complete(llm_of(runner_of("llama3", "modules", V, **options), prefix_cache=False), requests)
    runner = runner_of("llama3", "modules", V, **options)
    speculator, _ = speculator_of(name, "llama3", runner)
    assert complete(llm_of(runner, speculator, prefix_cache=False), requests) == plain
    assert speculator.failure is None and speculator.counts.accepted > 3


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(EVERY, ("medusa tree",)))
def test_coupled_texts_of_fifty_seeds_are_those_of_plain_decoding(name):
    prompt, options = requests_of("llama3", V)[2][0], {"blocks": 400, "block_size": 4}
    requests = [
        (prompt, SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True, seed=seed))
        for seed in range(50)
    ]
    plain = complete(llm_of(runner_of("llama3", "modules", V, **options)), requests)
    runner = runner_of("llama3", "modules", V, **options)
    speculator, _ = speculator_of(name, "llama3", runner)
    assert complete(llm_of(runner, speculator, sequences=50), requests) == plain
    assert len({tuple(texts[0]) for texts in plain.values()}) > 45
    assert speculator.failure is None and speculator.counts.accepted > 10


PATTERN, SCHEMA = r"[a-z]{2,6}(, [a-z]{2,6}){1,3}\.", '{"type": "array", "items": {"type": "integer"}}'
GUIDED = [
    SamplingParams(temperature=0.0, max_tokens=24, regex=PATTERN),
    SamplingParams(temperature=1.0, max_tokens=24, seed=3, n=2, regex=PATTERN),
    SamplingParams(temperature=0.0, max_tokens=24, json_schema=SCHEMA),
    SamplingParams(temperature=0.8, max_tokens=24, seed=5, repetition_penalty=1.2),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", mostly_slow([*CHAINS, *TREES], ("dspark",)))
def test_grammars_of_attar_tiny(name, tmp_path):
    pytest.importorskip("llguidance")
    head = head_of_kind(EVERY[name], load_model("attar:tiny"))
    save_draft_head(head, tmp_path, target="attar:tiny")
    prompts = ["x = ", "names: ", "data = ", "def "]
    plain = LLM("attar:tiny", kv_tokens=4096).generate(prompts, GUIDED)
    llm = LLM("attar:tiny", draft=tmp_path, kv_tokens=4096)
    llm.engine.speculator.policy = Eager()
    drafted = llm.generate(prompts, GUIDED)
    for one, other in zip(drafted, plain, strict=True):
        assert [sample.token_ids for sample in one.samples] == [sample.token_ids for sample in other.samples]
    assert llm.engine.speculator.failure is None and llm.engine.speculator.counts.drafted > 30


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3", "dflash", "dspark"])
def test_eviction_is_refused_by_name(kind, tmp_path):
    save_draft_head(head_of_kind(EVERY[kind], model_of("llama3", V)), tmp_path, target="target")
    with pytest.raises(SettingsError, match=rf"draft is '{tmp_path.name}'.*eviction='streaming'"):
        LLM("no such folder", draft=tmp_path, eviction=Streaming(sinks=2, window=9))
