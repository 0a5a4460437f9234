"""The whole API over a target with draft services: the answers of one process, at every endpoint."""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from copy import deepcopy

import pytest

pytest.importorskip("grpc")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
import httpx
import numpy as np

from attar.runtime.llm import LLM
from attar.serving.http.app import create_app
from attar.serving.http.backend import EngineBackend
from attar.serving.http.embeddings.embedders import EngineEmbedder
from attar.serving.http.remote_backend import RemoteBackend, load_of
from attar.serving.http.settings import ServerSettings
from attar.serving.http.tokenizer import ServerTokenizer
from attar.serving.services.build import hello_of_model, load_draft_service, load_with_offers
from attar.serving.services.channel import DRAFT, TARGET
from attar.serving.services.coordinator import Coordinator
from attar.serving.services.draft_stream import serve_drafts
from attar.serving.services.replicas import Replicas
from attar.serving.services.target_service import TargetService
from tests.serving.http.real import TEMPLATE
from tests.serving.http.test_live import running_app, until
from tests.serving.services.local import Waiting
from tests.serving.services.loopback import OPEN, listening, network

KV = {"kv_tokens": 4096}
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOL = {"name": "weather", "parameters": CITY | {"additionalProperties": False}}
TOOLS = {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}
SAID = {"messages": [{"role": "user", "content": "def area(width, height):"}], "max_tokens": 24}
TEXTS = ["import json", "def f(x):\n    return x", "class A:"]
REQUESTS = [
    ("completions", {"prompt": TEXTS, "max_tokens": 30, "temperature": 0}),
    ("completions", {"prompt": "import ", "n": 3, "seed": 5, "max_tokens": 20, "logprobs": 2}),
    ("completions", {"prompt": "import os", "max_tokens": 0, "echo": True, "logprobs": 1}),
    ("completions", {"prompt": "x = ", "regex": "[0-9]{3}", "seed": 1}),
    ("completions", {"prompt": "for i", "stop": ["\n"], "logit_bias": {"40": 5}, "seed": 2}),
    ("completions", {"prompt": "def f", "max_tokens": 40, "temperature": 0, "attar": {"tokens": True}}),
    ("chat/completions", {**SAID, "seed": 3, "n": 2, "logprobs": True, "top_logprobs": 2}),
    ("chat/completions", {**SAID, **TOOLS, "seed": 4, "parallel_tool_calls": False}),
    ("chat/completions", {**SAID, "seed": 5, "response_format": {"type": "json_schema", "json_schema": {
        "name": "a", "schema": CITY}}}),
    ("responses", {"input": "def area(width, height):", "max_output_tokens": 20, "temperature": 0}),
    ("responses", {"input": "x", "tools": [{"type": "function", **TOOL}], "tool_choice": "required",
                   "temperature": 0, "parallel_tool_calls": False}),
    ("embeddings", {"input": TEXTS}),
    ("score", {"text_1": TEXTS[0], "text_2": TEXTS}),
    ("rerank", {"query": TEXTS[0], "documents": TEXTS}),
    ("embeddings", {"input": "x" * 9000}),  # too long
    ("completions", {"prompt": "x", "max_tokens": 10, "regex": "("}),
    ("chat/completions", {"messages": SAID["messages"], "tool_choice": "required"}),
]  # fmt: skip
OWN = ("id", "created", "created_at", "completed_at", "call_id", "item_id", "system_fingerprint", "trace")


@contextmanager
def api(backend, tokenizer, dimensions, pooling="last"):
    """The address of an app over a backend."""
    own, settings = deepcopy(tokenizer), ServerSettings(port=0)
    own.chat_template = TEMPLATE
    embedder = EngineEmbedder(backend, pooling, dimensions) if pooling else None
    app = create_app(
        backend, settings, tokenizer=ServerTokenizer(own), model="attar:tiny", facts={}, embedder=embedder
    )
    with running_app(app, settings) as (url, _):
        yield url


@contextmanager
def drafts():
    """The port of a draft service with attar:draft."""
    service, loaded = load_draft_service("attar:draft", KV)
    own = hello_of_model("draft", loaded)
    try:
        with listening({DRAFT: lambda stream: serve_drafts(stream, service, own)}) as port:
            yield port, service
    finally:
        service.close()


def eager(llm):
    """Takes whatever is offered, so that drafts are verified on any machine."""
    speculator = llm.engine.speculator
    speculator.policy = speculator.proposer.policy = Waiting()


@contextmanager
def coordinated(port):
    """A coordinator over a target in this process: its address, and the target."""
    service = TargetService()
    llm, _ = load_with_offers("attar:tiny", service.pool, KV, embeddings=True)
    eager(llm)
    service.streams = llm.streams()
    local = EngineBackend(service.streams)
    service.load = lambda: load_of(local.stats())
    with listening({TARGET: service.serve}) as target:
        hello = deepcopy(service.hello)
        object.__setattr__(hello, "role", "coordinator")
        coordinator = Coordinator(f"127.0.0.1:{target}", [f"127.0.0.1:{port}"], hello, network(), OPEN)
        try:
            until(lambda: coordinator.target.connected and coordinator.replicas.clients[0].ready)
            until(lambda: next(iter(service.coordinators)).drafters)
            with api(RemoteBackend(coordinator, 1), llm.tokenizer, llm.engine.pooler.dimensions) as url:
                yield url, llm
            until(lambda: not coordinator.target.open_requests and not coordinator.links)
        finally:
            coordinator.close()


@contextmanager
def drafted(port):
    """An ordinary server whose drafts come from the service."""
    made = []

    def pool(hello, receive):
        made.append(Replicas([f"127.0.0.1:{port}"], hello, network(), receive, OPEN))
        return made[0]

    llm, _ = load_with_offers("attar:tiny", pool, KV, embeddings=True)
    eager(llm)
    try:
        until(lambda: made[0].clients[0].ready)
        with api(EngineBackend(llm.streams()), llm.tokenizer, llm.engine.pooler.dimensions) as url:
            yield url, llm
    finally:
        made[0].close()


@pytest.fixture(scope="module")
def plain():
    """Answers of one process without drafts."""
    llm = LLM("attar:tiny", embeddings=True, **KV)
    with api(EngineBackend(llm.streams()), llm.tokenizer, llm.engine.pooler.dimensions) as url:
        yield [ask(url, *request) for request in REQUESTS], streams(url)


def ask(url, path, body):
    answer = httpx.post(f"{url}/v1/{path}", json={"model": "attar:tiny", **body}, timeout=60)
    return answer.status_code, answer.json()


def streams(url):
    """What the streams of some requests say."""
    return [stream(url, *REQUESTS[index]) for index in (1, 7, 9)]


def stream(url, path, body):
    """Texts and calls by choice, and the kinds of events in their order."""
    kinds = []
    asked = {"model": "attar:tiny", "stream": True, **body}
    with httpx.stream("POST", f"{url}/v1/{path}", json=asked, timeout=60) as response:
        assert response.status_code == 200
        chunks = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    texts = defaultdict(str)
    for chunk in chunks:
        kind = chunk.get("type", "chunk")
        kinds += [kind] if kind not in kinds[-1:] else []
        texts["event"] += chunk["delta"] if isinstance(chunk.get("delta"), str) else ""
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta", {})
            texts[choice["index"]] += choice.get("text") or delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                texts["call"] += call["function"].get("name", "") + call["function"]["arguments"]
    return kinds, dict(texts)


def compared(value, seen):
    """A body without what differs from answer to answer; floats and proposers go to ``seen``."""
    if isinstance(value, dict):
        seen["proposers"] += value.get("proposers", [])
        kept = {key: one for key, one in value.items() if key not in (*OWN, "proposers")}
        return {key: compared(one, seen) for key, one in kept.items()}
    if isinstance(value, list):
        return [compared(one, seen) for one in value]
    if isinstance(value, float):
        seen["floats"].append(value)
        return None
    return value


def assert_same(answers, wanted):
    proposers = []
    for request, (status, body), (status_wanted, body_wanted) in zip(REQUESTS, answers, wanted, strict=True):
        seen, seen_wanted = ({"floats": [], "proposers": []} for _ in range(2))
        assert status == status_wanted, (request, body)
        assert compared(body, seen) == compared(body_wanted, seen_wanted), request
        assert np.allclose(seen["floats"], seen_wanted["floats"], atol=0.02), request
        proposers += seen["proposers"]
    return proposers


@pytest.mark.slow
@pytest.mark.parametrize("server", [coordinated, drafted], ids=["coordinator", "ordinary server"])
def test_every_endpoint_answers_as_one_process(plain, server):
    with ExitStack() as stack:
        port, service = stack.enter_context(drafts())
        url, llm = stack.enter_context(server(port))
        proposers = assert_same([ask(url, *request) for request in REQUESTS], plain[0])
        assert streams(url) == plain[1]
        for path in ("/", "/attar/state", "/metrics", "/v1/models", "/ready"):
            assert httpx.get(url + path).status_code == 200, path
        assert {"target", "draft"} <= set(proposers), set(proposers)
        counts = llm.engine.speculator.counts
        assert counts.drafts > 10 and counts.accepted > 0 and llm.engine.speculator.failure is None
        until(lambda: llm.engine.idle and service.running == 0)
        llm.engine.check()
