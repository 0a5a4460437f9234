"""A model that drafts for itself: which layers stay, whose memory it is, texts that are the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from attar.errors import ModelError, SettingsError
from attar.models.surgery.cut_model import keep_layers
from attar.runtime.completion import Completion
from attar.runtime.kv.evict import Streaming
from attar.runtime.loading import Loaded, load
from attar.runtime.runner.compiled import Compiled, compiled
from attar.runtime.runner.device.runner import Device, device_runner
from attar.runtime.runner.modules import Modules
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.draft_model import DraftModel
from attar.runtime.speculate.noise import Noise
from attar.runtime.speculate.proposer import DraftRequest
from attar.runtime.speculate.self_speculation import (
    draft_of,
    load_self_draft,
    spread,
    vocabulary_of,
    without_layers,
)
from attar.runtime.speculate.target import TargetLogits
from attar.runtime.speculate.verify import verify
from tests import tiny_mixtures, tiny_models
from tests.compiler import needs_compiler
from tests.marks import slow_but
from tests.runtime.driving import greedy

COUNT = 16


def modules(family: str = "llama3", **changes: Any) -> Modules:
    return Modules(tiny_models.build(family, **changes), blocks=16, block_size=8)


def texts(model: Any, draft: DraftModel, prompt: list[int], count: int) -> tuple[list[int], int]:
    """Greedy rounds; the text, and how many drafts were taken."""
    tokens, kept = list(prompt), 0
    while len(tokens) < len(prompt) + count:
        rules = Completion("r", 0, tokens, SamplingParams(temperature=0.0), seed=1, limit=99)
        (actual,) = draft.propose([DraftRequest(0, tokens, 3, rules=rules)])
        draft.check()
        assert actual is not None
        rows = torch.tensor([[*tokens, *actual.tokens]])
        logits = tiny_models.logits(model, rows)[0, -len(actual) - 1 :]
        verdict = verify(actual, TargetLogits(logits, rules, actual), Noise(1, 0, len(tokens)))
        tokens += verdict.tokens(actual)
        kept += len(verdict.path)
    draft.forget(0)
    return tokens[len(prompt) : len(prompt) + count], kept


def test_layers_are_spread_with_the_ends_among_them() -> None:
    assert spread(12, 0.5) == (0, 2, 4, 7, 9, 11)
    assert spread(3, 0.5) == (0, 2)
    assert spread(2, 0.9) == (0,) and spread(22, 0.01) == (0,)
    for layers in range(2, 40):
        kept = spread(layers, 0.4)
        assert list(kept) == sorted(set(kept)) and kept[-1] < layers and len(kept) < layers


@pytest.mark.few(3)
@pytest.mark.parametrize("family", ["llama3", "gemma2", "gemma3", "gpt2", "phi3", "qwen3", "opt", "gpt_neox"])
def test_a_copy_with_some_layers_is_the_model_without_the_others(family: str) -> None:
    runner = modules(family)
    result = without_layers(runner.model, (0, 2))
    ours, theirs = (
        {parameter.data_ptr() for parameter in model.parameters()} for model in (result, runner.model)
    )
    assert ours < theirs, "no tensor of its own"
    model = tiny_models.build(family)
    draft = DraftModel(Modules(result, blocks=16, block_size=8))
    prompt = tiny_models.tokens(model, length=11)[0].tolist()
    (actual,) = draft.propose([DraftRequest(0, prompt, 5)])
    assert actual is not None and list(actual.tokens) == greedy(keep_layers(model, [0, 2]), prompt, 5)
    assert runner.model.config.num_hidden_layers == 3
    (whole,) = DraftModel(runner).propose([DraftRequest(0, prompt, 5)])
    assert whole is not None and list(whole.tokens) == greedy(model, prompt, 5), "the model is as before"


def test_modules_draft_with_half_of_their_layers() -> None:
    target = Loaded(modules(num_hidden_layers=4))
    draft = load_self_draft("none", target, way="layers", min_confidence=0.1)
    runner = draft.runner
    assert isinstance(runner, Modules) and runner.pool.geometry.layers == 2 and draft.min_confidence == 0.1
    assert draft.nbytes == runner.pool.nbytes and runner.capacity == 16 and draft.name == "self"
    model = tiny_models.build("llama3", num_hidden_layers=4)
    prompt = tiny_models.tokens(model, length=9)[0].tolist()
    assert texts(model, draft, prompt, COUNT)[0] == greedy(model, prompt, COUNT)


@needs_compiler
@pytest.mark.parametrize("kind", slow_but(("compiled", "device"), "compiled"))
def test_layers_are_the_target_s_own_memory(kind) -> None:
    model = tiny_models.build("llama3", num_hidden_layers=4)
    settings: dict[str, Any] = {"blocks": 16, "kv_dtype": "float32", "weights": "int8"}
    if kind == "compiled":
        runner = compiled(model.config, model.state_dict(), bits=16, threads=1, **settings)
    else:
        runner = device_runner(model.config, model.state_dict(), **settings)
    draft = load_self_draft("none", Loaded(runner), way="layers")
    result = draft.runner
    assert isinstance(result, type(runner)) and result.capacity == 16
    assert [id(layer.down) for layer in result.weights.layers] == [
        id(runner.weights.layers[layer].down) for layer in (0, 3)
    ]
    assert draft.nbytes < runner.weights.nbytes
    prompt = tiny_models.tokens(model, length=9)[0].tolist()
    assert texts(model, draft, prompt, COUNT)[0] == greedy(model, prompt, COUNT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.build("llama3"), tmp_path_factory.mktemp("self") / "llama3")


@needs_compiler
def test_a_low_bit_copy(folder: Path) -> None:
    target = load(folder, kv_tokens=256)
    draft = load_self_draft(folder, target)
    runner = draft.runner
    assert isinstance(target.runner, Modules) and isinstance(runner, Compiled), "float32 runs in modules"
    assert runner.capacity * runner.block_size == 256 and draft.ends == frozenset(target.ends)
    weights = runner.weights
    assert len(weights.layers) == 3 and draft.nbytes > weights.nbytes
    products = weights.layers[0].down
    assert products.nbytes < products.rows * products.columns
    model = tiny_models.build("llama3")
    prompt = tiny_models.tokens(model, length=9)[0].tolist()
    actual, kept = texts(model, draft, prompt, COUNT)
    assert actual == greedy(model, prompt, COUNT) and kept > 0, "it mostly agrees"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama3", "qwen2_moe"])
def test_a_low_bit_copy_on_a_device(family, tmp_path: Path) -> None:
    """Of experts too; a copy has no copy of its own."""
    if family == "qwen2_moe":
        model = tiny_mixtures.build(family, shared_expert_intermediate_size=64)
    else:
        model = tiny_models.build(family)
    saved = tiny_models.save(model, tmp_path / family)
    target = load(saved, runner="device", kv_tokens=256)
    draft = load_self_draft(saved, target)
    assert isinstance(draft.runner, Device) and draft.runner.weights.nbytes < target.runner.weights.nbytes / 3
    prompt = tiny_models.tokens(model, length=9)[0].tolist()
    actual, kept = texts(model, draft, prompt, COUNT)
    assert actual == greedy(model, prompt, COUNT) and kept > 0
    packed = load(saved, runner="device", weights="int4", kv_tokens=256)
    with pytest.raises(ModelError, match="packed already"):
        load_self_draft(saved, packed, way="int4")


@needs_compiler
def test_weights_of_four_bits_already_draft_with_layers(folder: Path) -> None:
    target = load(folder, runner="compiled", weights="int4", kv_tokens=256)
    draft = load_self_draft(folder, target)
    assert isinstance(draft.runner, Compiled) and len(draft.runner.weights.layers) == 2
    with pytest.raises(ModelError, match="packed already"):
        load_self_draft(folder, target, way="int4")


def test_a_draft_model_loaded_with_the_target(folder: Path) -> None:
    target = load(folder, runner="modules", kv_tokens=256)
    draft = draft_of(load(folder, runner="modules", kv_tokens=256), target)
    model = tiny_models.build("llama3")
    prompt = tiny_models.tokens(model, length=9)[0].tolist()
    actual, kept = texts(model, draft, prompt, COUNT)
    assert actual == greedy(model, prompt, COUNT) and kept == COUNT * 3 // 4
    assert draft.name == "llama3" and vocabulary_of(target) == tiny_models.VOCABULARY


def test_refusals(folder: Path) -> None:
    one = Loaded(modules(num_hidden_layers=1), name="thin")
    with pytest.raises(ModelError, match="thin has one layer"):
        load_self_draft("none", one, way="layers")
    with pytest.raises(SettingsError, match="way is 'int3'"):
        load_self_draft("none", one, way="int3")
    with pytest.raises(SettingsError, match="share"):
        load_self_draft("none", one, share=1.0)
    evicted = Loaded(one.runner, eviction=Streaming(window=8, sinks=2))
    with pytest.raises(SettingsError, match="eviction of the draft is 'Streaming'"):
        draft_of(evicted, one)
