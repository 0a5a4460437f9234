"""Each path of the API carries its caller to the cache: no tenant finds a prefix that another computed."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
import httpx

from attar.runtime.admission import Limits
from attar.runtime.llm import LLM
from attar.serving.http.api_keys import make_api_keys
from attar.serving.http.app import create_app
from attar.serving.http.backend import EngineBackend
from attar.serving.http.embeddings.embedders import EngineEmbedder
from attar.serving.http.model_table import ServedModel
from attar.serving.http.settings import ServerSettings
from attar.serving.http.tokenizer import ServerTokenizer
from tests import tiny_models
from tests.serving.http.real import TEMPLATE
from tests.serving.http.test_live import running_app

KEYS = ("secret-of-one", "secret-of-two")
TEXT = "one two three four five six seven " * 2
MESSAGES = [{"role": "user", "content": TEXT}]
PATHS = {
    "completions": ("/v1/completions", {"prompt": TEXT, "max_tokens": 2}),
    "several completions": ("/v1/completions", {"prompt": TEXT, "max_tokens": 2, "n": 3}),
    "several prompts": ("/v1/completions", {"prompt": [TEXT, TEXT + "a"], "max_tokens": 2}),
    "echo": ("/v1/completions", {"prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 1}),
    "a stream": ("/v1/completions", {"prompt": TEXT, "max_tokens": 2, "stream": True}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}),
    "responses": ("/v1/responses", {"input": TEXT, "max_output_tokens": 2}),
    "embeddings": ("/v1/embeddings", {"input": [TEXT, TEXT + "a"]}),
    "score": ("/v1/score", {"text_1": TEXT, "text_2": "a b"}),
    "rerank": ("/v1/rerank", {"query": TEXT, "documents": ["a", "b"]}),
    "compare": ("/attar/compare", {"prompt": TEXT, "token_ids": [7, 3, 9]}),
}


@contextmanager
def serving(folder):
    """A server of two models with every path; and of each prefix that is asked for: the tenant, the tokens
    that were cached."""
    llms = [LLM(folder, kv_tokens=2048, limits=Limits(sequences=8), embeddings=True) for _ in range(2)]
    asked = []
    for llm in llms:
        watch(llm.engine.scheduler.manager, asked)
    backends, words = [EngineBackend(llm.streams()) for llm in llms], []
    for llm in llms:
        llm.tokenizer.chat_template = TEMPLATE
        words.append(ServerTokenizer(llm.tokenizer))
    settings = ServerSettings(port=0, api_key=KEYS)
    embedder = EngineEmbedder(backends[0], "mean", llms[0].engine.pooler.dimensions)
    second = ServedModel("two", backends[1], words[1])
    app = create_app(
        backends[0], settings, tokenizer=words[0], model="tiny", embedder=embedder, compare=second
    )
    with running_app(app, settings) as (url, _):
        yield url, asked, [key.salt for key in make_api_keys(KEYS, "")]


def watch(manager, asked):
    admit = manager.admit

    def watched(sequence, tokens, salt="", **options):
        cached = admit(sequence, tokens, salt, **options)
        asked.append((salt, cached))
        return cached

    manager.admit = watched


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tiny_models.save(tiny_models.build("llama3"), tmp_path_factory.mktemp("tenants") / "one")
    with serving(str(folder)) as served:
        yield served


@pytest.mark.few(2)
@pytest.mark.parametrize("path", PATHS)
def test_two_tenants_share_no_prefix(served, path):
    url, asked, salts = served
    place, body = PATHS[path]
    body = {"model": "tiny", **body} if "compare" not in place else body
    seen = []
    for key in (*KEYS, *KEYS):
        asked.clear()
        answer = httpx.post(url + place, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)
        assert answer.status_code == 200, answer.text
        seen.append(list(asked))
    assert [{salt for salt, _ in calls} for calls in seen] == [{salts[0]}, {salts[1]}] * 2
