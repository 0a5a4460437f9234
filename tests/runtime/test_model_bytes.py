"""The estimate of a model's memory against what is allocated."""

from __future__ import annotations

import pytest
import torch

from attar.checkpoint import open_checkpoint
from attar.kernels.packed import PackedWeight
from attar.kernels.structures import library
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
