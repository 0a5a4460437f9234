"""``response_format`` through the official client, attar:tiny behind a socket: conformance with an engine."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from copy import deepcopy

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")
pytest.importorskip("openai")
import openai

from attar.runtime.llm import LLM
from attar.serving.http.app import create_app
from attar.serving.http.backend import EngineBackend
from attar.serving.http.run import Server, listen
from attar.serving.http.settings import ServerSettings
from attar.serving.http.tokenizer import ServerTokenizer
from tests.runtime.schemas import SCHEMAS, follows

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
MESSAGES = [{"role": "user", "content": "a person"}]


@pytest.fixture(scope="module")
def client():
    llm = LLM("attar:tiny", kv_tokens=4096)
    llm.tokenizer.chat_template = TEMPLATE
    settings = ServerSettings(port=0)
    words = ServerTokenizer(deepcopy(llm.tokenizer))
    app = create_app(EngineBackend(llm.streams()), settings, tokenizer=words, model="tiny")
    listening, server = listen(settings), Server(app, settings)
    thread = threading.Thread(target=asyncio.run, args=(server.serve([listening]),), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    yield openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    server.should_exit = True
    thread.join(10)
    listening.close()
    assert not thread.is_alive()
    llm.engine.check()


def schema_of(name):
    return {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMAS[name], "strict": True}}


def chat(client, **options):
    return client.chat.completions.create(
        model="tiny", messages=MESSAGES, **{"max_tokens": 120, "seed": 3} | options
    )


def test_a_schema(client):
    answer = chat(client, response_format=schema_of("person"), n=3)
    whole = [choice for choice in answer.choices if choice.finish_reason == "stop"]
    assert whole
    for choice in whole:
        follows(json.loads(choice.message.content), SCHEMAS["person"], SCHEMAS["person"])


def test_a_stream_of_a_schema_is_the_same_text(client):
    whole = chat(client, response_format=schema_of("list")).choices[0]
    parts = list(chat(client, response_format=schema_of("list"), stream=True))
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert (
        text == whole.message.content and parts[-1].choices[0].finish_reason == whole.finish_reason == "stop"
    )
    follows(json.loads(text), SCHEMAS["list"], {})


def test_any_json_object_and_free_text(client):
    answer = chat(client, response_format={"type": "json_object"}, logit_bias={"0": 10}).choices[0]
    assert answer.message.content.startswith("{")
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content), dict)
    free = chat(client, response_format={"type": "text"}, max_tokens=8).choices[0].message.content
    assert free == chat(client, max_tokens=8).choices[0].message.content


def test_a_pattern_of_a_completion(client):
    for name, guide in (
        ("regex", "(red|green) [0-9]{2}"),
        ("grammar", 'start: ("red" | "green") / [0-9]{2}/'),
    ):
        result = client.completions.create(model="tiny", prompt="x = ", n=2, extra_body={name: guide})
        assert all(re.fullmatch("(red|green) [0-9]{2}", choice.text) for choice in result.choices)
        assert {choice.finish_reason for choice in result.choices} == {"stop"}


@pytest.mark.parametrize(
    ("options", "param", "sentence"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 3}}}},
         "response_format", "type must be a string"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is given with"),
        ({"extra_body": {"regex": "("}}, "regex", "unclosed group"),
        ({"extra_body": {"regex": "a", "grammar": "b"}}, "regex", "None where grammar is given"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_format_is_a_bad_request(client, options, param, sentence, stream):
    with pytest.raises(openai.BadRequestError, match=sentence) as caught:
        list(chat(client, stream=stream, **options))
    assert caught.value.param == param and "\n" not in caught.value.body["message"]


def test_stop_seed_logprobs_and_usage(client):
    plain = client.completions.create(model="tiny", prompt="def f(", max_tokens=20, temperature=0).choices[0]
    stop = plain.text[4:6]
    cut = client.completions.create(model="tiny", prompt="def f(", max_tokens=20, temperature=0, stop=[stop])
    assert cut.choices[0].text == plain.text[: plain.text.index(stop)]
    assert cut.choices[0].finish_reason == "stop" and plain.finish_reason in ("length", "stop")
    one, two = (chat(client, seed=9, max_tokens=12, logprobs=True, top_logprobs=2) for _ in range(2))
    assert one.choices[0].message.content == two.choices[0].message.content
    scored = one.choices[0].logprobs.content
    assert len(scored) == one.usage.completion_tokens and all(len(item.top_logprobs) == 2 for item in scored)
    assert all(item.logprob <= 0 for item in scored)
    assert one.usage.total_tokens == one.usage.prompt_tokens + one.usage.completion_tokens
