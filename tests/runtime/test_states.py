"""Models that carry states through the engine: completions are transformers' own with every kind of
scheduling at once, and no state outlives its sequence."""

import copy
import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch

from attar.errors import SettingsError
from attar.runtime.admission import Limits
from attar.runtime.llm import LLM
from attar.runtime.loading import Loaded
from attar.runtime.runner.compiled import compiled
from attar.runtime.runner.modules import Modules
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.build import make_speculator
from attar.runtime.speculate.latency import Latency
from attar.runtime.speculate.policy import DraftPolicy
from attar.runtime.speculate.self_speculation import load_self_draft
from attar.runtime.speculate.settings import SpeculationSettings
from attar.runtime.speculate.speculator import Speculator
from attar.runtime.speculate.suffix import SuffixProposer
from attar.serving.http.backend import EngineBackend
from tests import tiny_models
from tests.compiler import needs_compiler
from tests.runtime.driving import greedy

LENGTHS = (30, 9, 17, 1, 26)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def llm(name, blocks=14, speculate=None):
    """``lfm2 compiled``: by the compiled step, whose blocks are of 16 tokens."""
    family, _, kind = name.partition(" ")
    plain = tiny_models.build(family)
    if kind:
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.copy_(parameter.bfloat16().float())
        settings = {"kv_dtype": "float32", "bits": 16, "threads": 2}
        loaded = Loaded(compiled(plain.config, plain.state_dict(), blocks=blocks // 2, **settings))
    else:
        loaded = Loaded(Modules(copy.deepcopy(plain), blocks=blocks, block_size=4))
    speculator = None
    if speculate is not None:
        draws = SuffixProposer() if speculate == "suffix" else load_self_draft(None, loaded, way="layers")
        policy = DraftPolicy(Latency({1: 1.0, 8: 1.1, 64: 2.0}, {1: 0.01}), most=4)  # drafts pay
        ticks = itertools.count()  # not the machine's time: whether drafts pay is no part of the test
        speculator = Speculator(draws, policy, most=4, chains=True, clock=lambda: 1e-3 * next(ticks))
    limits = Limits(sequences=4, step_tokens=16, chunk=7)
    return plain, LLM.of(loaded, limits=limits, speculator=speculator)


def prompts(model):
    texts = [tiny_models.tokens(model, batch=1, length=n, seed=n)[0].tolist() for n in LENGTHS]
    return [text[: len(text) // 2] * 2 if len(text) > 1 else text for text in texts]  # drafts are found


@pytest.mark.parametrize(
    ("family", "speculate"),
    [
        ("qwen3_5", None),
        ("lfm2", "suffix"),
        pytest.param("lfm2 compiled", "suffix", marks=(needs_compiler, pytest.mark.slow)),
        pytest.param("qwen3_5 compiled", "suffix", marks=needs_compiler),
        pytest.param("granitemoehybrid compiled", "suffix", marks=(needs_compiler, pytest.mark.slow)),
        pytest.param("mamba2 compiled", "suffix", marks=(needs_compiler, pytest.mark.slow)),
        pytest.param("falcon_h1 compiled", "suffix", marks=(needs_compiler, pytest.mark.slow)),
        pytest.param("nemotron_h compiled", "suffix", marks=(needs_compiler, pytest.mark.slow)),
        pytest.param("lfm2_moe compiled", None, marks=(needs_compiler, pytest.mark.slow)),
        pytest.param("lfm2 compiled", "self", marks=(needs_compiler, pytest.mark.slow)),
        pytest.param("qwen3_5", "suffix", marks=pytest.mark.slow),
        pytest.param("falcon_h1", "suffix", marks=pytest.mark.slow),
        pytest.param("jamba", "self", marks=pytest.mark.slow),
        pytest.param("mamba2", "self", marks=pytest.mark.slow),
    ],
)
def test_completions_with_chunks_preemption_and_drafts(family, speculate):
    plain, model = llm(family, speculate=speculate)
    texts, count = prompts(plain), 24 if "compiled" in family else 8  # until blocks are missing
    results = model.generate(texts, dataclasses.replace(GREEDY, max_tokens=count))
    assert [result.token_ids for result in results] == [tuple(greedy(plain, text, count)) for text in texts]
    assert model.engine.scheduler.preemptions
    speculator = model.engine.speculator
    assert speculator is None or (speculator.counts.drafted and speculator.failure is None)
    model.engine.check()
    assert not model.engine.runner.states.sequences


@pytest.mark.parametrize("family", ["lfm2", pytest.param("qwen3_5 compiled", marks=needs_compiler)])
def test_samples_fork_the_states_of_their_prompt(family):
    plain, model = llm(family, blocks=64)
    text = prompts(plain)[0]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=6, n=3)
    together = model.generate([text], params)[0]
    apart = llm(family, blocks=64)[1].generate([text], params)[0]
    assert [sample.token_ids for sample in together.samples] == [sample.token_ids for sample in apart.samples]
    assert len({sample.token_ids for sample in together.samples}) == 3


@pytest.mark.parametrize("family", ["lfm2", pytest.param("qwen3_5 compiled", marks=needs_compiler)])
def test_a_cancelled_request_leaves_no_state(family):
    plain, model = llm(family)
    engine = model.engine
    ids = [engine.add(text, GREEDY) for text in prompts(plain)]
    for _ in range(3):
        engine.step()
    assert engine.runner.states.sequences
    for id in ids:
        engine.cancel(id)
    engine.check()
    assert not engine.runner.states.sequences


@pytest.mark.parametrize(
    ("family", "at"),
    [
        ("lfm2", 28),
        pytest.param("lfm2 compiled", 16, marks=(needs_compiler, pytest.mark.slow)),
        pytest.param("qwen3_5 compiled", 16, marks=needs_compiler),
        pytest.param("mamba2 compiled", 16, marks=(needs_compiler, pytest.mark.slow)),
        pytest.param("falcon_h1 compiled", 16, marks=(needs_compiler, pytest.mark.slow)),
        pytest.param("qwen3_5", 28, marks=pytest.mark.slow),
    ],
)
def test_prefixes_are_reused_up_to_a_snapshot(family, at):
    """At the last full block of an earlier prompt, and nowhere else."""
    plain, model = llm(family, blocks=64)
    text = prompts(plain)[0]  # 30 tokens
    other, short = [*text[: at + 1], 7, 8], [*text[: at - 4], 9]
    first = model.generate([text], GREEDY)[0]
    hit = []
    for again in (text, other, short):
        before = model.engine.scheduler.manager.stats.hit
        result = model.generate([again], GREEDY)[0]
        assert result.token_ids == tuple(greedy(plain, again, 8))
        hit.append(model.engine.scheduler.manager.stats.hit - before)
    assert first.token_ids == tuple(greedy(plain, text, 8)) and hit == [at, at, 0]


def test_what_states_exclude_is_refused():
    _, model = llm("lfm2")
    loaded = Loaded(model.engine.runner)
    with pytest.raises(SettingsError, match=r"speculate is 'lookahead'.*one chain of tokens"):
        make_speculator(SpeculationSettings(speculate="lookahead"), loaded)
    described = "\n".join(model.describe().lines())
    assert "states      1.54 kB a sequence" in described
    assert ", prefixes shared" in described


def test_metrics_of_states():
    """Bytes held, snapshots kept, and sequences that started from one; nothing of a model without states."""
    plain, model = llm("lfm2", blocks=64)
    text, size = prompts(plain)[0], model.engine.runner.state_bytes
    for reused in (0, 1):
        model.generate(text, GREEDY)
        backend = EngineBackend(SimpleNamespace(engine=model.engine))
        seen = {sample.name: sample.value for sample in backend.stats().samples}
        kept = seen["state_snapshots"]
        assert seen == {"state_bytes": kept * size, "state_snapshots": kept, "state_snapshots_reused": reused}
        assert kept >= 1 and size > 0
    without = llm("llama2", blocks=64)[1]
    assert EngineBackend(SimpleNamespace(engine=without.engine)).stats().samples == []
