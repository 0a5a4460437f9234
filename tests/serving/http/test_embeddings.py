"""Embeddings, scores and reranking over HTTP, of encoders, rerankers and causal models."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
import httpx
import torch

from attar.runtime.encoder import Encoder
from attar.runtime.llm import LLM
from attar.serving.http.app import create_app
from attar.serving.http.backend import EngineBackend
from attar.serving.http.embeddings import endpoint
from attar.serving.http.embeddings.embedders import EncoderThread, EngineEmbedder
from attar.serving.http.settings import ServerSettings
from attar.serving.http.tokenizer import ServerTokenizer
from tests import tiny_models
from tests.runtime.test_encoder import reranker
from tests.serving.http.real import refused
from tests.serving.http.test_live import running, running_app, until

TEXTS = ["def area(width, height):", "import json", "return width * height"]


@contextmanager
def running_encoder(folder, **settings):
    encoder, result = Encoder(folder), ServerSettings(port=0, **settings)
    thread = EncoderThread(encoder)
    words = ServerTokenizer(encoder.tokenizer)
    app = create_app(thread, result, tokenizer=words, model="tiny", embedder=thread)
    with running_app(app, result) as (url, server):
        yield url, encoder, words, server


@contextmanager
def running_causal(folder, pooling):
    llm, result = LLM(str(folder), kv_tokens=512, embeddings=pooling is not None), ServerSettings(port=0)
    backend = EngineBackend(llm.streams())
    embedder = pooling and EngineEmbedder(backend, pooling, llm.engine.pooler.dimensions)
    words = ServerTokenizer(llm.tokenizer)
    app = create_app(backend, result, tokenizer=words, model="tiny", embedder=embedder)
    with running_app(app, result) as (url, _):
        yield url, llm, words


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return {name: tiny_models.save(tiny_models.build(name), base / name) for name in ("bert", "llama3")}


def ask(url, path, **body):
    return httpx.post(f"{url}/v1/{path}", json={"model": "tiny", **body}, timeout=60)


def unit(vector):
    return np.asarray(vector) / np.linalg.norm(vector)


def test_the_official_client_embeds(folders):
    openai = pytest.importorskip("openai")
    with running_encoder(folders["bert"]) as (url, encoder, words, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        packed = client.embeddings.create(model="tiny", input=TEXTS)  # base64 behind the scenes
        plain = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
        short = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=8)
        ids = [words.encode(text) for text in TEXTS]
        wanted = [unit(vector) for vector in encoder.embed(ids)]
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == sum(map(len, ids))
    for index, item in enumerate(plain.data):
        assert item.index == index and np.allclose(item.embedding, wanted[index], atol=1e-5)
        assert np.allclose(packed.data[index].embedding, item.embedding, atol=1e-7)
    assert np.allclose(short.data[0].embedding, unit(wanted[0][:8]), atol=1e-5)


def test_causal_models_embed_by_their_engine(folders):
    with running_causal(folders["llama3"], "last") as (url, llm, _):
        many = [f"x{number} = {number}" for number in range(40)]  # several slices
        answer = ask(url, "embeddings", input=many).json()
        assert [item["index"] for item in answer["data"]] == list(range(40))
        again = ask(url, "embeddings", input=many[17]).json()["data"][0]["embedding"]
        assert np.allclose(again, answer["data"][17]["embedding"], atol=0.02)
        assert len({tuple(item["embedding"]) for item in answer["data"]}) == 40
        texts = ask(url, "completions", prompt="x", max_tokens=2)
        assert texts.status_code == 200, "the same server completes"
        until(lambda: llm.engine.idle)
        llm.engine.check()


def test_scores_of_pairs(folders, tmp_path):
    with running_encoder(folders["bert"]) as (url, encoder, words, _):
        answer = ask(url, "score", text_1=TEXTS[0], text_2=TEXTS).json()
        vectors = [unit(vector) for vector in encoder.embed([words.encode(text) for text in TEXTS])]
        assert answer["method"] == "cosine"
        scores = [item["score"] for item in answer["data"]]
        assert np.allclose(scores, [vectors[0] @ vector for vector in vectors], atol=1e-5)
        pairs = ask(url, "score", text_1=TEXTS, text_2=TEXTS).json()["data"]
        assert np.allclose([item["score"] for item in pairs], 1, atol=1e-5)
        refused(ask(url, "score", text_1=TEXTS[:2], text_2=TEXTS), 400, None, "text_1")
    folder, _ = reranker(tmp_path / "reranker")
    with running_encoder(folder) as (url, encoder, words, _):
        answer = ask(url, "score", text_1=TEXTS[0], text_2=TEXTS[1]).json()
        wanted = encoder.score(*[[part] for part in words.encode_pair(TEXTS[0], TEXTS[1])])
        assert answer["method"] == "classifier" and answer["data"][0]["score"] == pytest.approx(wanted[0][0])
        refused(ask(url, "embeddings", input="x"), 400)


def test_causal_models_score_by_log_probability(folders):
    with running_causal(folders["llama3"], None) as (url, llm, words):
        answer = ask(url, "score", text_1=TEXTS[0], text_2=TEXTS[1]).json()
        before, after = words.encode(TEXTS[0]), words.encode(TEXTS[1], False)
        logits = tiny_models.logits(tiny_models.build("llama3"), torch.tensor([before + after]))
        logprobs = logits[0].log_softmax(-1)
        positions = range(len(before) - 1, len(before) + len(after) - 1)
        wanted = sum(float(logprobs[at, token]) for at, token in zip(positions, after, strict=True))
        assert answer["method"] == "log_probability"
        assert answer["data"][0]["score"] == pytest.approx(wanted, abs=0.3)
        best = ask(url, "rerank", query=TEXTS[0], documents=TEXTS, top_n=2).json()
        assert len(best["results"]) == 2 and best["method"] == "log_probability"
        refused(ask(url, "embeddings", input="x"), 400, "embeddings_off")
        until(lambda: llm.engine.idle)


def test_the_best_document_comes_first(folders):
    with running_encoder(folders["bert"]) as (url, _, _, _):
        answer = ask(url, "rerank", query=TEXTS[2], documents=TEXTS).json()
        assert answer["results"][0]["index"] == 2 and answer["results"][0]["document"] == {"text": TEXTS[2]}
        scores = [item["relevance_score"] for item in answer["results"]]
        assert scores == sorted(scores, reverse=True) and len(scores) == 3
        documents = [{"text": text} for text in TEXTS]
        bare = ask(url, "rerank", query=TEXTS[2], documents=documents, return_documents=False).json()
        assert [item["index"] for item in bare["results"]] == [item["index"] for item in answer["results"]]
        assert "document" not in bare["results"][0]


def test_what_is_wrong_is_named(folders):
    with running_encoder(folders["bert"]) as (url, _, _, _):
        for body, param in (
            ({"input": []}, "input"),
            ({"input": ""}, "input"),
            ({"input": [[5, 999]]}, "input"),
            ({"input": "x " * 200}, "input"),
            ({"input": "x", "dimensions": 65}, "dimensions"),
            ({"input": ["x"] * 2049}, "input"),
            ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ):
            refused(ask(url, "embeddings", **body), 400, None, param)
        cut = ask(url, "embeddings", input="x " * 200, truncate_prompt_tokens=-1).json()
        assert cut["usage"]["prompt_tokens"] == 128
        refused(ask(url, "completions", prompt="x"), 400)
        refused(httpx.post(f"{url}/v1/embeddings", json={"model": "other", "input": "x"}), 404)


@contextmanager
def slow_encoder(folder):
    """Each slice takes a while; also yields the sizes of those that began."""
    with running_encoder(folder) as (url, encoder, _, server):
        embed, slices = encoder.embed, []

        def slow(rows):
            slices.append(len(rows))
            time.sleep(0.1)
            return embed(rows)

        encoder.embed = slow
        yield url, server.config.app.state.service.admission, slices


async def ask_until(url, begun, end):
    """Ask for 64 slices, and call ``end`` with the task once ``begun``."""
    async with httpx.AsyncClient(timeout=60) as http:
        body = {"model": "tiny", "input": ["x"] * (64 * endpoint.SLICE)}
        task = asyncio.create_task(http.post(f"{url}/v1/embeddings", json=body))
        while not begun() and not task.done():
            await asyncio.sleep(0.01)
        end(task)
        return await task


def test_a_client_that_leaves_ends_its_work(folders):
    """A slice that runs ends; no other begins, and nothing stays counted."""
    with slow_encoder(folders["bert"]) as (url, admission, slices):
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(ask_until(url, lambda: slices, lambda task: task.cancel()))
        until(lambda: admission.active == 0)
        assert slices and len(slices) < 64 and set(slices) == {endpoint.SLICE}
        assert ask(url, "embeddings", input="x").status_code == 200


def test_shutting_down_ends_embeddings(folders):
    with slow_encoder(folders["bert"]) as (url, admission, slices):
        answer = asyncio.run(ask_until(url, lambda: slices, lambda task: admission.shut_down()))
        refused(answer, 503, "shutting_down")


def test_a_server_without_embeddings_says_so():
    with running() as (url, _, _):
        detail = refused(ask(url, "embeddings", input="x"), 400, "embeddings_off")
        assert "--pooling" in detail["message"]
