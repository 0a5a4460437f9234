"""Ollama's own client, and plain HTTP, against scripted models."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("ollama", reason="pip install 'attar[dev]'")
import httpx
import numpy as np
import ollama

from attar.serving.http.app import create_app
from attar.serving.http.model_table import MemoryBudget, NamedModel, ServedModel
from attar.serving.http.ollama.models import API_VERSION
from attar.serving.http.settings import ServerSettings
from tests.serving.http.fake import ANSWER, FAIL, SLOW, FakeBackend, FakeTokenizer
from tests.serving.http.real import leaving, serving
from tests.serving.http.test_live import running_app, until

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
THINKS = f"<think>Hm.</think>Let me see.{CALL}"
CUT = '<tool_call>{"name": "add", "arguments": {"a": 1'
TEMPLATE = "<tool_call> tools </think> enable_thinking"
HI = [{"role": "user", "content": "hi"}]
INFILL = {"<fim_prefix>": 1, "<fim_suffix>": 2, "<fim_middle>": 5}


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


class KeepingTokenizer(FakeTokenizer):
    """Keeps the last conversation."""

    def chat(self, messages, options=None):
        self.messages = messages
        return super().chat(messages, options)


class FakeEmbedder:
    """The first tokens as numbers."""

    longest, dimensions = 8, 4

    async def embed(self, rows, job):
        assert all(len(row) <= self.longest for row in rows)
        self.rows = rows
        return [np.array([*row, 0, 0, 0, 0][:4], dtype=np.float32) for row in rows]


class Server:
    """A server with a model that is always loaded, and four that are loaded on request."""

    def __init__(self):
        self.words = {
            name: KeepingTokenizer(TEMPLATE) for name in ("first", "thinker", "cut", "Org/Mixed:7b")
        }
        self.words["coder"] = KeepingTokenizer()
        self.words["coder"].infill = INFILL
        answers = {
            "first": ANSWER,
            "thinker": THINKS,
            "cut": CUT,
            "Org/Mixed:7b": "I am mixed",
            "coder": "pass",
        }
        self.backends = {name: FakeBackend(200, answer) for name, answer in answers.items()}
        self.embedder, self.loads = FakeEmbedder(), []
        named = [
            NamedModel(name, 1, lambda name=name: self.load(name)) for name in answers if name != "first"
        ]
        self.settings = ServerSettings(port=0, alive_s=0.2)
        self.app = create_app(
            self.backends["first"],
            self.settings,
            tokenizer=self.words["first"],
            model="first",
            named=named,
            budget=MemoryBudget(None, 1),
            embedder=self.embedder,
            source="attar:tiny",
        )

    def load(self, name):
        self.loads.append(name)
        self.backends[name].alive = True
        return ServedModel(name, self.backends[name], self.words[name], source="attar:tiny")


@pytest.fixture(scope="module")
def served():
    server = Server()
    with running_app(server.app, server.settings) as (server.url, _):
        server.client = ollama.Client(host=server.url)
        yield server
    assert not server.app.state.service.admission.active


def post(server, path, **body):
    return httpx.post(f"{server.url}{path}", json={"model": "first", **body}, timeout=30)


def test_chat_and_its_stream(served):
    options = {"num_predict": 50, "temperature": 0.5, "seed": 7, "stop": ["\n"], "repeat_penalty": 1.5}
    answer = served.client.chat("first", messages=HI, options=options)
    assert answer.message.content == ANSWER and answer.message.role == "assistant"
    assert answer.done and answer.done_reason == "stop" and answer.model == "first"
    assert answer.eval_count == 13 and answer.prompt_eval_count == 10
    assert answer.eval_duration == answer.prompt_eval_duration == 10_000_000
    assert answer.total_duration > answer.load_duration >= 0
    params = served.backends["first"].asked[-1][1]
    assert (params.max_tokens, params.temperature, params.seed, params.stop) == (50, 0.5, 7, ("\n",))
    assert (params.repetition_penalty, params.top_k, params.top_p) == (1.5, 40, 0.9), "Ollama's defaults"
    parts = list(served.client.chat("FIRST:latest", messages=HI, stream=True, logprobs=True, top_logprobs=1))
    assert "".join(part.message.content for part in parts) == ANSWER
    assert [part.done for part in parts] == [False] * 13 + [True] and parts[-1].eval_count == 13
    assert parts[0].logprobs[0].top_logprobs[0].token == "H" and parts[0].model == "FIRST:latest"
    raw = post(served, "/api/chat", messages=HI)
    assert raw.headers["content-type"] == "application/x-ndjson" and raw.text.endswith("}\n")
    assert len(raw.text.splitlines()) == 14, "a stream unless it is false"
    short = served.client.chat("first", messages=HI, options={"num_predict": 3.0, "top_k": 1.0})
    assert short.message.content == "Hel" and short.done_reason == "length"


def test_a_loop_of_tools(served):
    messages = [*HI]
    answer = served.client.chat("thinker", messages=messages, tools=[add])
    assert answer.message.thinking == "Hm." and answer.message.content == "Let me see."
    call = answer.message.tool_calls[0]
    assert (call.function.name, call.function.arguments) == ("add", {"a": 1, "b": 2})
    messages += [answer.message, {"role": "tool", "tool_name": "add", "content": str(add(1, 2))}]
    served.client.chat("thinker", messages=messages, tools=[add])
    _, assistant, result = served.words["thinker"].messages
    assert json.loads(assistant["tool_calls"][0]["function"]["arguments"]) == {"a": 1, "b": 2}
    assert result["tool_call_id"] == assistant["tool_calls"][0]["id"] and result["name"] == "add"
    assert assistant["reasoning_content"] == "Hm."
    parts = list(served.client.chat("thinker", messages=HI, tools=[add], stream=True))
    calls = [part.message.tool_calls for part in parts if part.message.tool_calls]
    assert len(calls) == 1 and calls[0][0].function.arguments == {"a": 1, "b": 2}
    assert "".join(part.message.thinking or "" for part in parts) == "Hm."


def test_a_call_that_was_cut_is_text(served):
    for stream in (False, True):
        parts = served.client.chat("cut", messages=HI, tools=[add], stream=stream)
        parts = list(parts) if stream else [parts]
        assert not any(part.message.tool_calls for part in parts)
        assert "".join(part.message.content for part in parts) == 'add{"a": 1'


def test_thinking_is_turned_on_and_off(served):
    hidden = served.client.chat("thinker", messages=HI, think=False)
    assert hidden.message.thinking is None and hidden.message.content.startswith("Let me see.")
    assert served.words["thinker"].options.variables["enable_thinking"] is False
    shown = served.client.generate("thinker", "hi", think="high")
    assert shown.thinking == "Hm." and shown.response.startswith("Let me see.")
    assert served.words["thinker"].options.variables["enable_thinking"] is True
    with pytest.raises(ollama.ResponseError, match="does not support thinking"):
        served.client.chat("coder", messages=HI, think=True)


def test_a_last_message_of_the_assistant_goes_on(served):
    served.client.chat("first", messages=[*HI, {"role": "assistant", "content": "Well"}])
    assert served.words["first"].options.continued
    served.client.chat("first", messages=HI)
    assert not served.words["first"].options.continued


def test_generate(served):
    answer = served.client.generate("first", "hi", system="Be brief.")
    assert answer.response == ANSWER and answer.done_reason == "stop"
    roles = [(message["role"], message["content"]) for message in served.words["first"].messages]
    assert roles == [("system", "Be brief."), ("user", "hi")]
    again = served.client.generate("first", "more", context=answer.context)
    prompt = served.backends["first"].asked[-1][0]
    assert list(prompt[: len(answer.context)]) == list(answer.context) and len(again.context) > len(prompt)
    raw = served.client.generate("first", "hi", raw=True)
    assert served.backends["first"].asked[-1][0] == (256, *b"hi") and raw.context is None
    assert "".join(part.response for part in served.client.generate("first", "hi", stream=True)) == ANSWER


def test_a_text_between_prefix_and_suffix(served):
    assert served.client.generate("coder", "a", suffix="b").response == "pass"
    assert served.backends["coder"].asked[-1][0] == (256, 1, *b"a", 2, *b"b", 5)
    with pytest.raises(ollama.ResponseError, match="no tokens for filling in"):
        served.client.generate("first", "a", suffix="b")


def test_format_holds_the_answer_to_a_schema(served):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    served.client.chat("first", messages=HI, format=schema)
    assert json.loads(served.backends["first"].asked[-1][1].json_schema) == schema
    served.client.generate("first", "hi", format="json")
    assert json.loads(served.backends["first"].asked[-1][1].json_schema) == {"type": "object"}


def test_embeddings(served):
    answer = served.client.embed("first", ["a", "a much longer text"])
    assert len(answer.embeddings) == 2 and answer.prompt_eval_count == 2 + 8
    assert np.linalg.norm(answer.embeddings[0]) == pytest.approx(1)
    assert served.embedder.rows[1] == [256, *b"a much "], "the beginning is read"
    assert len(served.client.embed("first", "a", dimensions=2).embeddings[0]) == 2
    assert served.client.embeddings("first", "a").embedding == pytest.approx(answer.embeddings[0])
    with pytest.raises(ollama.ResponseError, match="this model reads 8"):
        served.client.embed("first", "a much longer text", truncate=False)
    assert served.client.embed("first", []).embeddings == []


def test_models_are_listed_and_shown(served):
    names = ["first:latest", "thinker:latest", "cut:latest", "Org/Mixed:7b", "coder:latest"]
    listed = served.client.list().models
    assert [model.model for model in listed] == names
    first = listed[0]
    assert first.size > 10**7 and len(first.digest) == 64 and first.modified_at.year > 2000
    assert (first.details.family, first.details.format) == ("llama", "safetensors")
    assert (first.details.parameter_size, first.details.quantization_level) == ("6.82M", "BF16")
    shown = served.client.show("First")
    assert shown.capabilities == ["completion", "tools", "thinking", "embedding"]
    assert (
        shown.modelinfo["general.architecture"] == "llama" and shown.modelinfo["llama.context_length"] == 2048
    )
    assert shown.template == TEMPLATE and "num_ctx" in shown.parameters and shown.details.family == "llama"
    assert served.client.chat("org/mixed:7B", messages=HI).message.content == "I am mixed"
    assert "Org/Mixed:7b" in [model.model for model in served.client.ps().models]
    assert served.client.pull("first").status == "success"
    assert [part.status for part in served.client.pull("first", stream=True)][-1] == "success"


def test_an_unloaded_model_is_shown_without_a_load(served):
    httpx.post(f"{served.url}/api/generate", json={"model": "cut", "keep_alive": 0})
    until(lambda: "cut:latest" not in [model.model for model in served.client.ps().models])
    loads = len(served.loads)
    shown = served.client.show("cut")
    assert shown.capabilities == ["completion"] and len(served.loads) == loads


def test_keep_alive_unloads_and_keeps(served):
    def running():
        return {model.model: model for model in served.client.ps().models}

    assert served.client.chat("coder", keep_alive=-1).done_reason == "load"
    assert running()["coder:latest"].expires_at.year == 9999
    served.client.chat("coder", messages=HI, keep_alive="10m")
    left = running()["coder:latest"].expires_at.timestamp() - time.time()
    assert 500 < left < 610 and running()["coder:latest"].context_length == 200
    served.client.chat("coder", messages=HI, keep_alive=0)
    until(lambda: "coder:latest" not in running())
    assert served.client.generate("coder", "hi").response == "pass" and served.loads.count("coder") >= 2
    assert served.client.generate("coder", keep_alive=0).done_reason == "unload"
    until(lambda: "coder:latest" not in running())
    with pytest.raises(ollama.ResponseError, match="always loaded"):
        served.client.generate("first", keep_alive=0)
    assert served.client.chat("first", messages=HI, keep_alive=0).message.content == ANSWER


def test_a_long_conversation_loses_its_oldest_turns(served):
    turns = [
        {"role": role, "content": f"{index} " + "x" * 30}
        for index in range(5)
        for role in ("user", "assistant")
    ]
    messages = [{"role": "system", "content": "S"}, *turns, *HI]
    response = post(served, "/api/chat", messages=messages, stream=False)
    assert response.json()["message"]["content"] == ANSWER
    kept = [message["content"][:2] for message in served.words["first"].messages]
    assert kept[0] == "S" and kept[-1] == "hi" and kept[1] in ("3 ", "4 ") and len(kept) % 2 == 0
    assert response.headers["x-left-out-messages"] == str(12 - len(kept))
    whole = post(served, "/api/chat", messages=messages, truncate=False)
    assert whole.status_code == 400 and "context is 200" in whole.json()["error"]
    assert post(served, "/api/chat", messages=[{"role": "user", "content": "x" * 300}]).status_code == 400


def test_the_addresses_that_clients_look_at(served):
    assert (
        httpx.head(served.url).status_code == 200
        and "text/html" in httpx.get(served.url).headers["content-type"]
    )
    assert httpx.get(f"{served.url}/api/version").json()["version"] == API_VERSION
    assert httpx.head(f"{served.url}/api/tags").status_code == 200
    curl = {"content-type": "application/x-www-form-urlencoded"}
    body = b'{"model": "first", "messages": [{"role": "user", "content": "hi"}], "stream": false}'
    assert httpx.post(f"{served.url}/api/chat", content=body, headers=curl).json()["done"]


def test_what_is_ignored_is_noted(served):
    options = {"mirostat": 1, "num_ctx": 10**6, "num_thread": 4, "bad name\r\nX: 1": 2}
    response = post(served, "/api/chat", messages=HI, options=options, shift=True, stream=False)
    noted = response.headers["x-ignored-fields"].split(", ")
    assert noted == ["options.num_ctx", "shift", "options.mirostat", "options.num_thread"]


REFUSED = [
    ("/api/chat", {"messages": [{"role": "judge", "content": "hi"}]}, 400, "messages.0.role"),
    ("/api/chat", {"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content"),
    ("/api/chat", {"messages": [{"role": "user", "content": "", "images": ["aGk="]}]}, 400, "text alone"),
    ("/api/chat", {"messages": HI, "options": {"temperature": "hot"}}, 400, "options.temperature"),
    ("/api/chat", {"messages": HI, "options": {"num_predict": "many"}}, 400, "options.num_predict"),
    ("/api/chat", {"messages": HI, "options": []}, 400, "options"),
    ("/api/chat", {"messages": HI, "think": "hard"}, 400, "low, medium, high"),
    ("/api/chat", {"messages": HI, "format": "yaml"}, 400, "JSON schema"),
    ("/api/chat", {"messages": HI, "keep_alive": "soon"}, 400, "duration such as 5m"),
    ("/api/chat", {"messages": HI, "tools": [{"type": "function"}]}, 400, "tools.0.function"),
    ("/api/chat", {"messages": HI, "top_logprobs": 21, "logprobs": True}, 400, "top_logprobs"),
    ("/api/chat", {"model": "other", "messages": HI}, 404, "model 'other' not found; this server has"),
    ("/api/chat", {"model": "", "messages": HI}, 400, "model"),
    ("/api/generate", {"prompt": "hi", "template": "{{ .Prompt }}"}, 400, "--chat-template"),
    ("/api/generate", {"prompt": "hi", "raw": True, "system": "S"}, 400, "raw mode"),
    ("/api/generate", {"prompt": "hi", "context": [-1]}, 400, "context.0"),
    ("/api/generate", {"prompt": "hi", "context": [257]}, 400, "outside the vocabulary"),
    ("/api/generate", {"prompt": "hi", "images": ["aGk="]}, 400, "text alone"),
    ("/api/embed", {"input": [1, 2]}, 400, "input"),
    ("/api/show", {"model": "other"}, 404, "not found"),
    ("/api/pull", {"model": "other"}, 404, "not found"),
    ("/api/create", {"from": "first"}, 400, "--named-model"),
    ("/api/copy", {"source": "first", "destination": "../x"}, 400, "--named-model"),
    ("/api/unknown", {}, 404, "/api/unknown"),
]


@pytest.mark.parametrize(("path", "body", "status", "word"), REFUSED)
def test_what_is_refused_is_refused_in_a_line(served, path, body, status, word):
    response = post(served, path, **body)
    assert response.status_code == status and set(response.json()) == {"error"}
    assert word in response.json()["error"] and "\n" not in response.json()["error"]


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model": "first", "prompt": "hi", "options": {"temperature": NaN}}',
        b'{"model": "first", "prompt": "hi", "options": {"top_p": 1e999}}',
        b'{"model": "first", "format": ' + b'{"items":' * 500 + b"{}" + b"}" * 500 + b', "messages": []}',
        b'{"model": "first", "options": {' + b",".join(b'"o%d": 1' % n for n in range(9000)) + b"}}",
        b'{"model": "first", "keep_alive": NaN}',
        b'{"model": "first", "prompt": "\\ud800"}',
        b'["model"]',
        b"{",
        b"",
    ],
)
def test_hostile_bodies_get_one_line(served, raw):
    for path in ("/api/chat", "/api/generate"):
        response = httpx.post(f"{served.url}{path}", content=raw)
        assert response.status_code == 400 and set(response.json()) == {"error"}, response.text


def test_a_client_that_leaves_cancels_its_request(served):
    backend = served.backends["first"]
    with leaving(served.url, {"model": "first", "prompt": chr(SLOW), "raw": True}, "/api/generate"):
        pass
    before = served.app.state.service
    until(lambda: not backend.open and not before.admission.active)


def test_a_silence_is_a_line_without_text(served):
    backend, words = served.backends["first"], served.words["first"]
    words.encode, encode = (lambda text, special=True: [SLOW]), words.encode
    try:
        with httpx.stream(
            "POST", f"{served.url}/api/generate", json={"model": "first", "prompt": "x", "raw": True}
        ) as r:
            lines = r.iter_lines()
            parts = [json.loads(next(lines)) for _ in range(2)]
            backend.loop.call_soon_threadsafe(backend.release.set)
            parts += map(json.loads, lines)
    finally:
        words.encode = encode
        backend.loop.call_soon_threadsafe(backend.release.clear)
    assert parts[1]["response"] == "" and not parts[1]["done"]
    assert "".join(part["response"] for part in parts) == ANSWER and parts[-1]["done"]


def test_a_failure_is_a_status_or_the_last_line(served):
    with pytest.raises(ollama.ResponseError, match="the model failed"):
        list(served.client.generate("first", "hi", context=[FAIL], stream=True))
    response = post(served, "/api/generate", prompt="hi", context=[FAIL])
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert lines[0]["response"] == "H" and lines[-1].keys() == {"error"}
    whole = post(served, "/api/generate", prompt="hi", context=[FAIL], stream=False)
    assert whole.status_code == 500 and "the model failed" in whole.json()["error"]


def test_the_client_of_asyncio(served):
    async def ask():
        client = ollama.AsyncClient(host=served.url)
        answer = await client.chat("first", messages=HI)
        stream = await client.generate("first", "hi", stream=True)
        return answer.message.content, "".join([part.response async for part in stream])

    assert asyncio.run(ask()) == (ANSWER, ANSWER)


@pytest.mark.slow
def test_a_real_model_follows_schema_seed_and_context():
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    with serving() as (url, _, _):
        client, options = ollama.Client(host=url), {"num_predict": 8, "seed": 3}
        assert set(json.loads(client.chat("tiny", messages=HI, format=schema).message.content)) == {"n"}
        first, second = (client.generate("tiny", "def f(", raw=True, options=options) for _ in range(2))
        assert first.response == second.response and first.eval_count == 8 and first.done_reason == "length"
        turn = client.generate("tiny", "x = 1", options=options)
        again = client.generate("tiny", "y = 2", context=turn.context, options=options)
        assert again.prompt_eval_count > turn.prompt_eval_count + turn.eval_count
        ended = client.generate(
            "tiny", "import os\nimport ", raw=True, options={"stop": "\n", "temperature": 0}
        )
        assert "\n" not in ended.response and ended.done_reason == "stop"
        left = httpx.post(f"{url}/completion", json={"prompt": "import os\nimport ", "stop": ["\n"]}).json()
        assert left["stop_type"] == "word" and left["stopping_word"] == "\n"
