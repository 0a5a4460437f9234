"""The estimate of a model's memory against what is allocated."""

from __future__ import annotations

import pytest
import torch

from attar import memory
from attar.checkpoint import open_checkpoint
from attar.errors import MemoryNeededError
from attar.kernels.packed import PackedWeight
from attar.kernels.structures import library
from attar.runtime.admission import Limits
from attar.runtime.kv.state_snapshots import BYTES
from attar.runtime.llm import LLM
from attar.runtime.model_bytes import model_bytes
from tests import tiny_models


def allocated(llm):
    """Bytes of weights and cache."""
    runner = llm.engine.runner
    cache = runner.facts["kv_bytes"] + runner.facts["hidden_bytes"]
    if hasattr(runner, "model"):
        return cache + sum(one.nbytes for one in (*runner.model.parameters(), *packed(runner.model)))
    weights = runner.weights
    layers = [vars(layer).values() for layer in weights.layers]
    parts = [weights.embedding, weights.head, weights.norm, *(part for layer in layers for part in layer)]
    own = {id(part): part for part in parts if isinstance(part, torch.Tensor | PackedWeight)}
    rotary = {id(layer.rotary) for layer in weights.layers}
    return cache + sum(part.nbytes for key, part in own.items() if key not in rotary)


def packed(model):
    return [module.packed for module in model.modules() if hasattr(module, "packed")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("sizes")
    models = {"float32": "llama2", "bfloat16": "llama2", "tied": "smollm", "gpt2": "gpt2"}
    for name, family in models.items():
        model = tiny_models.build(family)
        if name in ("bfloat16", "tied"):
            model = model.to(torch.bfloat16)
        tiny_models.save(model, place / name)
    return place


@pytest.mark.parametrize(
    "name, options",
    [
        ("float32", {}),
        ("float32", {"embeddings": True}),
        ("bfloat16", {}),
        ("bfloat16", {"kv_dtype": "int8"}),
        ("tied", {}),
        ("tied", {"weights": "int4"}),
        ("bfloat16", {"weights": "int8"}),
        ("gpt2", {}),
        ("attar:tiny", {}),
        ("attar:tiny", {"runner": "modules"}),
        ("attar:tiny", {"dtype": "float32"}),
    ],
)
@pytest.mark.few(2)
def test_what_is_allocated_is_what_was_estimated(folders, name, options):
    if library() is None and options.get("weights"):
        pytest.skip("no compiler")
    model = name if name.startswith("attar") else str(folders / name)
    for tokens in (64, 4096):
        options["kv_tokens"] = tokens
        estimate = model_bytes(open_checkpoint(model), **options)
        actual = allocated(LLM(model, **options))
        assert 0.97 * actual <= estimate <= 1.25 * actual, (estimate, actual)


def test_the_default_cache_is_counted(folders):
    folder = str(folders / "float32")
    llm = LLM(folder)
    size = model_bytes(open_checkpoint(folder))
    assert (
        size - model_bytes(open_checkpoint(folder), kv_tokens=16) > 0.99 * llm.engine.runner.facts["kv_bytes"]
    )


def test_states_are_counted(tmp_path, monkeypatch):
    """Of sequences that run and of snapshots, by config: as the loaded model has them, or refused at once."""
    folder = str(tiny_models.save(tiny_models.build("jamba"), tmp_path / "jamba"))
    llm = LLM(folder, kv_tokens=64)
    facts, checkpoint = llm.engine.runner.facts, open_checkpoint(folder)
    states, snapshots = facts["state_bytes"], BYTES // facts["state_bytes"] * facts["state_bytes"]
    estimate = model_bytes(checkpoint, kv_tokens=64, sequences=5)
    assert 0 <= estimate - allocated(llm) - snapshots - 10 * states < 0.01 * estimate
    assert estimate - model_bytes(checkpoint, kv_tokens=64, sequences=2) == 6 * states > 0
    without = model_bytes(checkpoint, kv_tokens=64, sequences=5, prefix_cache=False)
    assert estimate - without == snapshots > 0
    monkeypatch.setattr(memory, "free_memory", lambda **_: estimate)
    message = r"with the states of 9,000 sequences and of snapshots needs .* and 27.* are free"
    with pytest.raises(MemoryNeededError, match=message):
        LLM(folder, kv_tokens=64, limits=Limits(sequences=9000, step_tokens=9000))
    LLM(folder, kv_tokens=64, limits=Limits(sequences=5))
    monkeypatch.setattr(memory, "free_memory", lambda **_: without)
    LLM(folder, kv_tokens=64, limits=Limits(sequences=5), prefix_cache=False)
    with pytest.raises(MemoryNeededError, match="of 5 sequences and of snapshots"):
        LLM(folder, kv_tokens=64, limits=Limits(sequences=5))
