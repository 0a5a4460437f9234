"""Speculation with real models: transformers' modules of several families, the compiled step, attar:tiny.

Greedy texts are those of plain decoding, whatever drafts: with trees and chains that are partly right, with
every store of keys and values, and where eviction packs or punches the cache.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

import pytest

from attar.errors import SettingsError
from attar.runtime.admission import Limits
from attar.runtime.kv.evict import H2O, SnapKV, Streaming
from attar.runtime.llm import LLM
from attar.runtime.loading import Loaded
from attar.runtime.runner.modules import Modules
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.settings import EngineSettings
from attar.runtime.speculate.latency import measure
from attar.runtime.speculate.lookahead import LookaheadProposer
from attar.runtime.speculate.suffix import SuffixProposer
from tests import tiny_models
from tests.marks import slow_but
from tests.runtime.fake_runner import FakeRunner
from tests.runtime.speculate.proposing import Eager, Oracle, speculator

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
FAST = ("llama3",)
CODE = [
    "def __init__(self, name):\n    self.name = name\n",
    "import os\nimport sys\n\n",
    "x = [1, 2, 3]\n",
    "#",
]


@cache
def plain_model(family: str):
    return tiny_models.build(family)


def llm_of(family: str, proposer=None, *, limits=None, blocks=96, block_size=4, **options) -> LLM:
    runner = Modules(copy.deepcopy(plain_model(family)), blocks=blocks, block_size=block_size, **options)
    drafter = None if proposer is None else speculator(proposer, most=10)
    most = runner.most
    loaded = Loaded(runner, eviction=options.get("eviction"), lookback=runner.lookback, most=most)
    return LLM.of(loaded, limits=limits, speculator=drafter)


def prompts(family: str, lengths=(13, 5, 21)) -> list[list[int]]:
    model = plain_model(family)
    return [tiny_models.tokens(model, batch=1, length=n, seed=n)[0].tolist() for n in lengths]


def answers(llm: LLM, asked, params=GREEDY) -> list[tuple[int, ...]]:
    results = [text.token_ids for result in llm.generate(asked, params) for text in result.samples]
    llm.engine.check()
    drafter = llm.engine.speculator
    assert drafter is None or drafter.failure is None
    return results


@pytest.mark.parametrize(
    "family", [f if f in FAST else pytest.param(f, marks=pytest.mark.slow) for f in tiny_models.DECODERS]
)
def test_families(family: str) -> None:
    """Trees of which some tokens are right, in chunks and batches, and what the texts repeat."""
    asked = prompts(family)
    want = answers(llm_of(family), asked)
    texts = [prompt + list(text) for prompt, text in zip(asked, want, strict=True)]
    vocabulary = plain_model(family).config.vocab_size
    for proposer in (
        Oracle(texts, vocabulary=vocabulary),
        SuffixProposer(),
        LookaheadProposer(2, 3, 2),
    ):
        llm = llm_of(family, proposer, limits=Limits(step_tokens=32, sequences=4, chunk=12))
        assert answers(llm, asked) == want
        assert llm.engine.speculator.counts.drafts > 5
        assert [answers(llm, one)[0] for one in asked] == want  # alone, on what the first run published


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "options",
    [
        {"kv_dtype": "int8"},
        {"kv_dtype": "fp8"},
        {"kv_dtype": "int4"},
        {"kv_dtype": "kivi4", "block_size": 32, "blocks": 32},
        {"eviction": Streaming(sinks=2, window=9)},
        {"eviction": SnapKV(capacity=8, window=4)},
    ],
    ids=["int8", "fp8", "int4", "kivi4", "streaming", "snapkv"],
)
@pytest.mark.parametrize("chains", [True, False])
def test_stores_and_eviction(options, chains: bool) -> None:
    asked = prompts("llama3", (13, 30))
    want = answers(llm_of("llama3", **options), asked)
    texts = [prompt + list(text) for prompt, text in zip(asked, want, strict=True)]
    vocabulary = plain_model("llama3").config.vocab_size
    llm = llm_of("llama3", Oracle(texts, vocabulary=vocabulary, chains=chains), **options)
    assert answers(llm, asked) == want
    assert llm.engine.speculator.counts.accepted > 5


def test_measuring_leaves_nothing_behind() -> None:
    runner = FakeRunner()
    actual = measure(runner)
    assert list(actual[1]) == [1, 2, 4, 8, 16, 32] and list(actual[8]) == [8, 16, 32, 64]
    assert all(seconds > 0 for points in actual.values() for seconds in points.values())
    assert list(measure(runner, budget=0.0)) == [1]
    assert list(measure(FakeRunner(blocks=1))[1]) == [1, 2, 4]


@pytest.mark.parametrize(
    ("name", "value"),
    [("speculate", "ngrams"), ("verification", "fast"), ("drafts", 0), ("draft", "attar:tiny")],
)
def test_wrong_settings_are_refused_by_name(name: str, value: object) -> None:
    options = {"speculate": "ngram", name: value} if name == "draft" else {name: value}
    with pytest.raises(SettingsError) as error:
        LLM("no such folder", **options)
    assert name in error.value.message or "speculate" in error.value.message


def test_h2o_is_refused_with_its_sentence_before_anything_is_read() -> None:
    for ask in (
        lambda: LLM("no such folder", eviction=H2O(heavy=4, recent=4), speculate="ngram"),
        lambda: EngineSettings(eviction="h2o:4,4", draft="attar:tiny"),
    ):
        with pytest.raises(SettingsError, match="rejected drafts"):
            ask()


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return plain_by("auto")


@cache
def plain_by(runner: str) -> LLM:
    return LLM("attar:tiny", kv_tokens=4096, runner=runner)


@cache
def drafting(**options) -> LLM:
    llm = LLM("attar:tiny", kv_tokens=4096, **options)
    assert llm.engine.speculator is not None
    eager = Eager()
    eager.most = llm.engine.speculator.most
    llm.engine.speculator.policy = eager
    return llm


WAYS = [
    {"speculate": "ngram"},
    {"speculate": "suffix"},
    {"speculate": "lookahead"},
    {"speculate": "self"},
    {"draft": "attar:tiny"},
    {"draft": "attar:tiny", "speculate": "suffix"},
]
NAMES = ["ngram", "suffix", "lookahead", "self", "draft", "both"]


@pytest.mark.few(1)
@pytest.mark.parametrize("runner", slow_but(("auto", "device"), "auto"))
@pytest.mark.parametrize("options", WAYS, ids=NAMES)
def test_seeded_completions_of_attar_tiny(options, runner) -> None:
    """Sampled texts with warps and penalties are those of plain decoding; both steps round alike."""
    params = [
        SamplingParams(temperature=0.7, top_p=0.9, seed=seed, max_tokens=24, n=1 + seed % 2)
        for seed in range(3)
    ]
    params += [replace(params[0], repetition_penalty=1.2, presence_penalty=0.3, stop=("\n",))]
    llm, plain = drafting(**options, **({} if runner == "auto" else {"runner": runner})), plain_by(runner)
    want, got = plain.generate(CODE, params), llm.generate(CODE, params)
    assert [item.samples for item in got] == [item.samples for item in want]
    assert llm.engine.speculator.failure is None and llm.engine.speculator.counts.drafts
    llm.engine.check()


@pytest.mark.few(1)
@pytest.mark.parametrize("options", WAYS[:3], ids=NAMES[:3])
def test_grammars(tiny: LLM, options) -> None:
    pytest.importorskip("llguidance")
    pattern = r"(ab){3,9}(, [a-c]{2,6}){1,3}\."
    params = [SamplingParams(temperature=t, regex=pattern, max_tokens=40, seed=3, n=3) for t in (0.0, 1.0)]
    llm = drafting(**options)
    before = llm.engine.speculator.counts.accepted
    want, got = tiny.generate(CODE[:2], params), llm.generate(CODE[:2], params)
    assert [item.samples for item in got] == [item.samples for item in want]
    assert llm.engine.speculator.counts.accepted > before


@pytest.mark.slow
def test_drafts_behind_the_end_of_a_grammar(tiny: LLM) -> None:
    """Where it is complete no token is allowed any more: the text ends as without drafts."""
    pytest.importorskip("llguidance")
    params = SamplingParams(temperature=0.0, regex="(ab){3,9}c", max_tokens=40, ignore_eos=True)
    want = tiny.generate(CODE[0], params)[0]
    assert want.finish_reason == "stop"
    llm = drafting(speculate="ngram")
    kept = llm.engine.speculator.proposer
    whole = [*llm.encode(CODE[0]), *want.token_ids, 5, 6, 7, 8, 9]
    llm.engine.speculator.proposer = Oracle([whole], right=1.0, chains=True)
    try:
        for _ in range(8):
            assert llm.generate(CODE[0], params)[0].samples == want.samples
    finally:
        llm.engine.speculator.proposer = kept


@pytest.mark.slow
def test_streams_and_usage(tiny: LLM) -> None:
    llm = drafting(speculate="ngram")
    params = replace(GREEDY, max_tokens=60)
    events = list(llm.stream(CODE[0], params))
    assert tuple(t for e in events for t in e.token_ids) == tiny.generate(CODE[0], params)[0].token_ids
    usage = events[-1].usage
    assert usage is not None and usage.drafted_tokens >= usage.accepted_tokens > 0
    assert len(events) < 60


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("options", WAYS, ids=NAMES)
def test_five_hundred_tokens_in_float32(options, batch: int) -> None:
    asked = [f"{CODE[n % 4]}{n}" for n in range(batch)]
    params = replace(GREEDY, max_tokens=500)
    shared = {"kv_tokens": 16384, "dtype": "float32", "runner": "modules"}
    want = [param.token_ids for param in LLM("attar:tiny", **shared).generate(asked, params)]
    llm = LLM("attar:tiny", **shared, **options)
    assert [param.token_ids for param in llm.generate(asked, params)] == want
    llm.engine.speculator.policy = Eager()
    assert [param.token_ids for param in llm.generate(asked, params)] == want
    assert llm.engine.speculator.failure is None
    llm.engine.check()


@pytest.mark.slow
@pytest.mark.parametrize("options", WAYS, ids=NAMES)
def test_fifty_seeds_of_attar_tiny(options) -> None:
    """In float32, where a row does not depend on how many are run with it but for the last bits."""
    params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=40) for seed in range(50)]
    shared = {"kv_tokens": 16384, "dtype": "float32", "runner": "modules"}
    want = LLM("attar:tiny", **shared).generate([CODE[0]] * 50, params)
    llm = LLM("attar:tiny", **shared, **options)
    llm.engine.speculator.policy = Eager()
    got = llm.generate([CODE[0]] * 50, params)
    assert [item.samples for item in got] == [item.samples for item in want]
    assert llm.engine.speculator.failure is None and llm.engine.speculator.counts.accepted


def test_the_server_sees_the_counts() -> None:
    pytest.importorskip("prometheus_client")
    from attar.serving.http.backend import EngineBackend

    llm = drafting(speculate="ngram")
    llm.generate(CODE[0], GREEDY)
    counts = llm.engine.speculator.counts
    message = EngineBackend(type("Quiet", (), {"engine": llm.engine})()).stats().speculation
    assert message is not None and message.drafts == counts.drafts > 0
    assert (message.drafted, message.accepted) == (counts.drafted, counts.accepted)
    assert message.accepted_at == counts.accepted_at
