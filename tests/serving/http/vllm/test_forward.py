"""/v1 through attar's server to a fake vLLM: keys, bounds, fields, streams, and ends of either side."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import contextmanager

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
import httpx

from attar.errors import AttarError, MissingExtraError
from attar.serving.http.app import create_app
from attar.serving.http.settings import ServerSettings
from attar.serving.http.vllm import process
from attar.serving.http.vllm.forward import VllmBackend, make_forward
from tests.serving.http.fake import FakeTokenizer
from tests.serving.http.test_live import running_app, until
from tests.serving.http.vllm.programs import asked, install

KEYS = """keys:
  - {name: web, key: secret-of-web, priority: 2}
  - {name: metered, key: secret-of-metered, tokens_per_minute: 2}
"""
WEB, METERED = ({"Authorization": f"Bearer secret-of-{name}"} for name in ("web", "metered"))
PROMPT = {"model": "fake", "prompt": "hi"}


@pytest.fixture
def log(tmp_path, monkeypatch):
    return install(tmp_path, monkeypatch)


@pytest.fixture
def served(tmp_path, log):
    """A client, the log of what vLLM was asked, and vLLM."""
    with serving(tmp_path, log) as parts:
        yield parts


@contextmanager
def serving(tmp_path, log, **settings):
    keys = tmp_path / "keys.yml"
    keys.write_text(KEYS)
    settings = ServerSettings(port=0, keys=str(keys), max_texts=4, max_queue=8, **settings)
    with process.running(process.find_vllm(), "model", ["--dtype", "bfloat16"]) as server:
        backend = VllmBackend(server, 64, 257, 2)
        app = create_app(
            backend, settings, tokenizer=FakeTokenizer(), model="fake", forward=make_forward(backend)
        )
        with running_app(app, settings) as (url, _), httpx.Client(base_url=url, timeout=20) as client:
            yield client, log, server


def test_requests_pass_with_the_fields_of_their_caller(served):
    client, log, _ = served
    assert client.post("/v1/completions", json=PROMPT).status_code == 401
    answer = client.post("/v1/completions", json={**PROMPT, "top_k": 3, "novel": [1]}, headers=WEB)
    assert answer.json()["choices"][0]["text"] == "one two three"
    assert client.get("/v1/models", headers=WEB).json() == {"data": [{"id": "fake"}]}
    assert client.get("/v1/other", headers=WEB).status_code == 404
    options, request = asked(log)
    assert options["options"][:-1] == ["serve", "model", "--dtype", "bfloat16", "--uds"]
    salt = request["body"].pop("cache_salt")
    assert request["body"] == {**PROMPT, "top_k": 3, "novel": [1], "priority": 2} and len(salt) == 16
    assert "authorization" not in {name.lower() for name in request["headers"]}
    assert client.get("/vllm/metrics", headers=WEB).json() == {"vllm": 1}


def test_a_stream_comes_as_it_is_written_and_is_charged(served):
    client, log, _ = served
    with client.stream("POST", "/v1/completions", json={**PROMPT, "stream": True}, headers=METERED) as answer:
        pieces = [(time.monotonic(), piece) for piece in answer.iter_raw()]
    events = b"".join(piece for _, piece in pieces).decode().split("\n\n")
    assert [json.loads(event[6:])["choices"][0]["text"] for event in events[:3]] == ["one ", "two ", "three"]
    assert events[3:] == ["data: [DONE]", ""] and pieces[-1][0] - pieces[0][0] > 0.02
    assert asked(log)[1]["body"]["stream_options"] == {"include_usage": True}
    generated = 'attar:generation_tokens_total{model_name="fake"} 3.0'
    until(lambda: generated in client.get("/metrics", headers=WEB).text)
    refused = client.post("/v1/completions", json=PROMPT, headers=METERED)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")


def test_a_usage_that_was_asked_for_stays(served):
    client, *_ = served
    body = {**PROMPT, "stream": True, "stream_options": {"include_usage": True}}
    assert '"total_tokens":8' in client.post("/v1/completions", json=body, headers=METERED).text


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({**PROMPT, "n": 5}, 400, "too_many_texts"),
        ({**PROMPT, "prompt": ["a"] * 65}, 400, "too_many_prompts"),
        ({**PROMPT, "priority": -5}, 400, "priority_not_allowed"),
    ],
)
def test_bounds_are_attars(served, body, status, code):
    client, log, _ = served
    answer = client.post("/v1/completions", json=body, headers=WEB)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert len(asked(log)) == 1


def test_what_is_no_json_is_refused(served):
    client, *_ = served
    assert client.post("/v1/completions", content=b"{no", headers=WEB).status_code == 400


def test_a_client_that_leaves_is_seen_by_vllm(served):
    client, log, _ = served

    async def leave():
        async with httpx.AsyncClient(base_url=client.base_url, timeout=0.3) as http:
            with pytest.raises(httpx.ReadTimeout):
                await http.post("/v1/completions", json={**PROMPT, "prompt": "wait"}, headers=WEB)

    asyncio.run(leave())
    until(lambda: asked(log)[-1] == {"left": True})


def test_a_stream_ends_with_its_time(tmp_path, log):
    with serving(tmp_path, log, request_s=0.3) as (client, _, _):
        body = {**PROMPT, "prompt": "long", "stream": True}
        began, words = time.monotonic(), 0
        with (
            pytest.raises(httpx.RemoteProtocolError),
            client.stream("POST", "/v1/completions", json=body, headers=WEB) as answer,
        ):
            words = sum(piece.count(b"data: {") for piece in answer.iter_raw())
        assert time.monotonic() - began < 5 and words < 1500
        late = client.post("/v1/completions", json={**PROMPT, "prompt": "wait"}, headers=WEB)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "cancelled")


def test_paths_pass_as_they_are_written(served):
    client, *_ = served
    assert client.get("/v1/models/org%2Fa%20b%0d", headers=WEB).status_code == 404


def test_a_server_whose_vllm_has_ended_says_so(served):
    client, _, server = served
    answer = client.post("/v1/completions", json={**PROMPT, "prompt": "die"}, headers=WEB)
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "vLLM does not answer")
    until(lambda: server.failure is not None)
    health = client.get("/health")
    assert (health.status_code, health.json()["reason"]) == (503, "vLLM has ended with code 3")


def test_the_pages_state_and_what_vllm_does_not_answer(served):
    client, *_ = served
    state = client.get("/attar/state", headers=WEB).json()
    assert (state["model"], state["context"], state["running"], state["chat"]) == ("fake", 64, 0, True)
    assert "attar" in client.get("/").text
    ollama = client.post("/api/generate", json={"model": "fake", "prompt": "hi"}, headers=WEB)
    assert ollama.status_code == 400 and "vLLM answers /v1 alone" in ollama.text


def test_a_vllm_that_ends_while_it_loads(log):
    with (
        pytest.raises(AttarError, match="vLLM has ended with code 1 before it served the model"),
        process.running(process.find_vllm(), "model", ["--fail"]),
    ):
        pass


def test_no_vllm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingExtraError, match="the package 'vllm' is not installed"):
        process.find_vllm()
