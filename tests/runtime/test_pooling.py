"""Embeddings of causal models are the pooled states of transformers' modules, however the prompts are run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attar.checkpoint import open_checkpoint
from attar.errors import SettingsError
from attar.kernels.build import why_missing
from attar.runtime.admission import Limits
from attar.runtime.llm import LLM
from attar.runtime.sampling.params import SamplingParams
from tests import tiny_models

ROWS = [list(range(5, 45)), [7, 8, 9], [11], [*range(5, 45), 100]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.save(tiny_models.build("llama3"), tmp_path_factory.mktemp("tiny"))


@torch.no_grad()
def expected(folder, row, pooling):
    from transformers import AutoModel

    states = AutoModel.from_pretrained(folder, dtype=torch.float32)(torch.tensor([row])).last_hidden_state[0]
    return (states.mean(0) if pooling == "mean" else states[-1]).numpy()


def embeddings(llm, rows, pooling):
    params = SamplingParams(temperature=0, max_tokens=1, pooling=pooling)
    names = [llm.engine.add(row, params) for row in rows]
    by_name = {}
    while not llm.engine.idle:
        for event in llm.engine.step():
            if event.embedding is not None:
                by_name[event.request] = event.embedding
    llm.engine.check()
    return [by_name[name] for name in names]


def cosine(a, b):
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_pooled_states_are_those_of_transformers(folder):
    llm = LLM(str(folder), embeddings=True, kv_tokens=512, runner="modules")
    for pooling in ("mean", "last"):
        for row, actual in zip(ROWS, embeddings(llm, ROWS, pooling), strict=True):
            assert actual.dtype == np.float32 and actual.shape == (64,)
            assert cosine(actual, expected(folder, row, pooling)) > 0.999, (pooling, row)
        assert cosine(expected(folder, ROWS[0], "mean"), expected(folder, ROWS[1], "mean")) < 0.99


@pytest.mark.skipif(bool(why_missing("decode")), reason="no compiler")
def test_the_compiled_step_pools_the_same():
    folder = open_checkpoint("attar:tiny").path
    llm = LLM(
        "attar:tiny", embeddings=True, kv_tokens=512, runner="compiled", kv_dtype="float32", activations=16
    )
    for row, actual in zip(ROWS, embeddings(llm, ROWS, "mean"), strict=True):
        assert cosine(actual, expected(folder, row, "mean")) > 0.999


def test_chunks_and_cached_prefixes_change_nothing(folder):
    whole = LLM(str(folder), embeddings=True, kv_tokens=512, runner="modules")
    alone = [embeddings(whole, [row], "mean")[0] for row in ROWS]
    chunked = LLM(
        str(folder),
        embeddings=True,
        kv_tokens=512,
        runner="modules",
        limits=Limits(sequences=4, step_tokens=16, chunk=8),
    )
    for _ in range(2):  # the second time prefixes are cached
        for one, other in zip(embeddings(chunked, ROWS, "mean"), alone, strict=True):
            assert np.allclose(one, other, atol=0.02)
    assert chunked.engine.scheduler.manager.stats.hit > 0


def test_without_states_there_are_no_embeddings(folder):
    llm = LLM(str(folder), kv_tokens=512, runner="modules")
    with pytest.raises(SettingsError, match="pooling"):
        llm.engine.add([5], SamplingParams(max_tokens=1, pooling="mean"))
    with pytest.raises(SettingsError, match="pooling"):
        SamplingParams(pooling="median")
