"""No request delays another: the event loop answers /health while one is read, refused or run.

No test looks at a clock, for the machine may be busy; ``benchmarks/serve_attacks.py`` prints the times.
"""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from copy import deepcopy

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
import httpx

from attar import chat_template
from attar.errors import DataError
from attar.limited_process import LimitedProcess
from attar.serving.http import request_body
from attar.serving.http.errors import ApiError
from attar.serving.http.message_form import read_arguments
from attar.serving.http.protocol import ChatRequest, CompletionRequest
from attar.serving.http.request_body import parse
from attar.serving.http.responses import dump_json
from attar.serving.http.service import SMALL
from attar.serving.http.tokenizer import ServerTokenizer
from tests.serving.http.fake import FakeBackend, FakeTokenizer
from tests.serving.http.real import COMPLETIONS, body, lent, load_tiny, refused, serving
from tests.serving.http.test_live import running, until

JSON = {"Content-Type": "application/json"}


@contextmanager
def health(url):
    """Asks for /health again and again, before the block begins and until it is over."""
    begun, over, statuses = threading.Event(), threading.Event(), []

    def ask():
        with httpx.Client(timeout=30) as http:
            while not over.wait(0.005):
                statuses.append(http.get(f"{url}/health").status_code)
                begun.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        assert begun.wait(30)
        yield
    finally:
        over.set()
        thread.join(30)
    assert not thread.is_alive() and set(statuses) == {200}


@pytest.fixture(scope="module")
def server():
    """Whose bodies may be large, so that what is in them is all that is refused."""
    with serving(model=load_tiny(), max_body=8 << 20) as (url, _, _):
        yield url


def message_content(content, **more):
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": content}], **more}).encode()


def completion(**more):
    return json.dumps(body(**more)).encode()


ATTACKS = {
    "parts": (
        lambda: message_content([{"type": "text", "text": "a"}] * 100_000, model="x"),
        "too_many_values",
    ),
    "messages": (lambda: b'{"model":"x","messages":[' + b'{"role":"user"},' * 130_000 + b"1]}", None),
    "ids": (lambda: completion(prompt=[5] * 900_000), "context_length_exceeded"),
    "rows of ids": (lambda: completion(prompt=[[5] * 2000] * 600), "too_many_prompts"),
    "short rows": (lambda: completion(prompt=[[1, 2]] * 300_000), "too_many_values"),
    "biases": (lambda: completion(logit_bias={str(t): 1 for t in range(150_000)}), "too_many_values"),
    "unknown fields": (lambda: completion(**{f"f{i}": 1 for i in range(100_000)}), "too_many_values"),
    "fields of a message": (
        lambda: message_content("a", metadata={str(number): {} for number in range(100_000)}),
        "too_many_values",
    ),
    "a long prompt": (lambda: completion(prompt="x = 1\n" * 400_000), "context_length_exceeded"),
    "a long message": (lambda: message_content("x = 1\n" * 400_000), None),
    "levels": (lambda: b"[" * 3_000_000, None),
    "surrogates": (lambda: b'{"prompt": "' + b"\\ud800" * 600_000 + b'"}', None),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("attack", ATTACKS)
def test_large_bodies_delay_no_other_request(server, attack):
    build, code = ATTACKS[attack]
    content = build()
    path = "/v1/chat/completions" if b"messages" in content[:200] else COMPLETIONS
    with health(server):
        refused(httpx.post(server + path, content=content, headers=JSON, timeout=30), 400, code)


def test_large_bodies_are_read_and_long_texts_cut_in_threads(monkeypatch):
    """And small bodies by the event loop, which is quicker."""
    threads = {}

    def noted(name, act):
        def noting(*values):
            threads.setdefault(name, []).append(threading.current_thread().name.rpartition("_")[0])
            return act(*values)

        return noting

    monkeypatch.setattr(request_body, "parse", noted("parse", parse))
    with running(FakeBackend(context=1 << 20)) as (url, _, server):
        words = server.config.app.state.service.tokenizer
        words.encode = noted("encode", words.encode)
        for length in (1, SMALL + 1):
            asked = {"model": "tiny", "prompt": "x" * length}
            assert httpx.post(f"{url}/v1/completions", json=asked, timeout=30).status_code == 200
    assert threads == {"parse": ["", "attar-small"], "encode": ["attar-small", "attar-large"]}


def test_tokenize_is_bounded(server):
    with health(server):
        for text, code in (("x = 1\n" * 500_000, "context_length_exceeded"), ("x = 1\n" * 5000, None)):
            message_content = refused(
                httpx.post(f"{server}/tokenize", json={"prompt": text}, timeout=30), 400, code
            )
            assert "2,048" in message_content["message"]
        huge = {"tokens": [5] * 500_000}
        refused(httpx.post(f"{server}/detokenize", json=huge, timeout=30), 400, "context_length_exceeded")


class Held(FakeTokenizer):
    """Long texts take until somebody lets them go."""

    def __init__(self):
        self.free = threading.Event()

    def encode(self, text, special=True):
        if len(text) > SMALL:
            self.free.wait(60)
        return super().encode(text[:50], special)


def test_long_texts_wait_for_each_other_and_short_ones_for_none():
    with running(FakeBackend(context=1 << 20)) as (url, _, server):
        words = server.config.app.state.service.tokenizer = Held()

        def ask(prompt):
            answer = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": prompt}, timeout=60)
            statuses.append(answer.status_code)

        statuses = []
        threads = [threading.Thread(target=ask, args=("x" * (SMALL + 1),)) for _ in range(8)]
        for thread in threads:
            thread.start()
        admission = server.config.app.state.service.admission
        until(lambda: admission.arriving == 8, 30)
        with health(url):
            for _ in range(5):
                ask("x")
        assert statuses == [200] * 5 and admission.arriving == 8
        words.free.set()
        for thread in threads:
            thread.join(30)
        assert statuses == [200] * 13


def test_names_of_tokens_wait_for_no_text():
    """``piece`` is called by the event loop while a thread cuts a long text."""
    words, names = ServerTokenizer(lent().tokenizer), []
    thread = threading.Thread(
        target=lambda: names.append((words.encode("x = 1"), words.piece(5))), daemon=True
    )
    with words._lock:  # as a tokenizer written in Python holds it for as long as a text takes
        thread.start()
        thread.join(30)
    assert names


def test_a_deep_schema_is_called_deep(server):
    schema = {"type": "string"}
    for _ in range(900):
        schema = {"type": "array", "items": schema}
    deep = {"type": "json_schema", "json_schema": {"name": "deep", "schema": schema}}
    content = message_content("a", response_format=deep)
    answer = httpx.post(f"{server}/v1/chat/completions", content=content, headers=JSON)
    detail = refused(answer, 400, "invalid_value", "response_format")
    assert "levels" in detail["message"] and "surrogate" not in detail["message"]
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    answer = httpx.post(
        f"{server}/v1/chat/completions", content=message_content("a", tools=tools), headers=JSON
    )
    refused(answer, 400, "invalid_value", "tools")


def nested(levels, kind=dict):
    value = "x"
    for _ in range(levels):
        value = {"a": value} if kind is dict else [value]
    return value


DEEP = {
    "chat_template_kwargs": lambda deep: {"chat_template_kwargs": {"x": deep}},
    "metadata": lambda deep: {"metadata": {"x": deep}},
    "tools": lambda deep: {"tools": [{"type": "function", "function": {"name": "f", "parameters": deep}}]},
    "messages": lambda deep: {"messages": [{"role": "user", "content": "a", "name": deep}]},
    "structured_outputs": lambda deep: {"structured_outputs": {"json": {"const": deep}}},
    "unknown": lambda deep: {"unknown": deep},
}


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", [dict, list])
@pytest.mark.parametrize("field", DEEP)
def test_no_field_is_nested_deeply(server, field, kind, caplog):
    """On every path, in one line, and without a traceback in the log."""
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a"}],
        **DEEP[field](nested(200, kind)),
    }
    for path in ("/v1/chat/completions", "/tokenize"):
        detail = refused(httpx.post(server + path, json=asked), 400, "invalid_value", field)
        assert "64 levels" in detail["message"] and len(detail["message"]) < 100
    asked = {"model": "tiny", "input": "a", **DEEP[field](nested(200, kind))}
    assert "64 levels" in refused(httpx.post(f"{server}/v1/responses", json=asked), 400)["message"]
    assert not [record for record in caplog.records if record.exc_info]


def test_input_items_are_not_nested_deeply(server):
    asked = {
        "model": "tiny",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": nested(99)}]}],
    }
    refused(httpx.post(f"{server}/v1/responses", json=asked), 400, "invalid_value", "input")


def test_a_template_without_end_costs_its_bound_once(monkeypatch):
    """And is not tried in every form of a message."""
    limited, count = LimitedProcess("attar.chat_template:answer", 0.2, 1 << 30), []

    def counted(asked):
        count.append(asked)
        return limited(asked)

    monkeypatch.setattr(chat_template, "_process", lambda pid: counted)
    tokenizer = deepcopy(lent().tokenizer)
    tokenizer.chat_template = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(DataError, match=r"chat template cannot be rendered: it needs more than") as caught:
        ServerTokenizer(tokenizer).chat([{"role": "user", "content": "a"}])
    assert len(count) == 1 and caught.value.kind == "template_cost" and "\n" not in caught.value.message


@pytest.mark.parametrize("levels", [20, 200, 900])
def test_deep_arguments_of_a_call_are_text(levels):
    """They are a text in the body, and may have come from the model."""
    text = json.dumps(nested(levels))
    assert read_arguments(text) == (nested(levels) if levels <= 64 else {"arguments": text})


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"prompt": [1, 2, "a"]}, "prompt", "a list of token ids"),
        ({"prompt": [1, -2]}, "prompt", "whole numbers from 0"),
        ({"prompt": [[1], [True]]}, "prompt", "whole numbers from 0"),
        ({"prompt": 1}, "prompt", "it is a text"),
        ({"stop": [1]}, "stop", "a list of texts"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids.0", "integer"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a", "integer"),
        ({"max_tokens": 0}, "max_tokens", "echo is true"),
        ({"temperature": "hot"}, "temperature", "number"),
    ],
)
def test_a_wrong_value_is_named_in_plain_words(changes, param, words):
    with pytest.raises(ApiError) as caught:
        parse(json.dumps({"model": "m", "prompt": "a", **changes}).encode(), CompletionRequest)
    assert caught.value.param == param and words in caught.value.message, caught.value.message
    assert "constrained" not in caught.value.message and caught.value.status == 400


@pytest.mark.parametrize(
    ("content", "param", "words"),
    [
        (1, "messages.0.content", "valid"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "messages.0.content.0.type", "text alone"),
        ([{"type": "text", "text": 5}], "messages.0.content.0.text", "string"),
    ],
)
def test_a_wrong_message_is_named_by_its_place(content, param, words):
    with pytest.raises(ApiError) as caught:
        parse(message_content(content), ChatRequest)
    assert caught.value.param == param and words in caught.value.message, caught.value.message


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"\xff", "not valid JSON"),
        (b'{"a": 1', "not valid JSON"),
        (b'{"n": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[" * 5000, "nested too deeply"),
        (b"[" * 100_000, "more than 65,536 values"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "nested too deeply"),
        (b"[]", "not a JSON object"),
        (b'{"model": "m", "prompt": "\\uD800"}', "surrogate"),
        (b'{"model": "m", "prompt": "a", "user": "\\udfff"}', "surrogate"),
        (b'{"model": "m", "prompt": "a", "metadata": {"\\ud800": 1}}', "surrogate"),
    ],
)
def test_bodies_that_are_none(raw, words):
    with pytest.raises(ApiError, match=words):
        parse(raw, CompletionRequest)


def test_brackets_in_a_text_are_text():
    parsed, _ = parse(message_content('{["\\\n' * 20_000), ChatRequest)
    assert parsed.messages[0].content == '{["\\\n' * 20_000


def test_pairs_of_surrogates_are_text():
    parsed, _ = parse(b'{"model": "m", "prompt": "\\ud83d\\udc4d"}', CompletionRequest)
    assert parsed.prompt == "\U0001f44d"


def test_long_answers_are_written_as_ever():
    entry = {"token": "ä\n", "logprob": -0.5, "top_logprobs": [{"token": '"', "bytes": [1, 2]}]}
    data = {"choices": [{"logprobs": {"content": [entry] * 3}, "index": 0}] * 2, "usage": {}, "none": []}
    assert dump_json(data) == json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    with pytest.raises(ValueError, match="not JSON compliant"):
        dump_json({"a": [float("nan")]})


def test_top_p_0_takes_the_likeliest(server):
    greedy = httpx.post(server + COMPLETIONS, json=body(max_tokens=12), timeout=30).json()
    asked = body(max_tokens=12, top_p=0) | {"temperature": 1.5}
    drawn = httpx.post(server + COMPLETIONS, json=asked, timeout=30).json()
    assert drawn["choices"][0]["text"] == greedy["choices"][0]["text"]


def test_a_text_is_scored_without_a_token_more(server):
    asked = body("def f(x):", max_tokens=0, echo=True, logprobs=1)
    result = httpx.post(server + COMPLETIONS, json=asked, timeout=30).json()
    choice, usage = result["choices"][0], result["usage"]
    count = httpx.post(f"{server}/tokenize", json={"prompt": "def f(x):"}).json()["count"]
    assert choice["text"] == "def f(x):" and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"]) == count
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (count, 0, count)
    longer = httpx.post(server + COMPLETIONS, json=asked | {"max_tokens": 3}, timeout=30).json()["choices"][0]
    assert longer["logprobs"]["token_logprobs"][:count] == choice["logprobs"]["token_logprobs"]
    refused(httpx.post(server + COMPLETIONS, json=asked | {"echo": False}), 400, param="max_tokens")


@pytest.mark.few(2)
@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 7e-46, 1e-30])
def test_no_temperature_ends_the_engine(server, temperature):
    asked = body(max_tokens=4) | {"temperature": temperature}
    assert httpx.post(server + COMPLETIONS, json=asked, timeout=30).status_code == 200
    assert httpx.get(f"{server}/health").status_code == 200


@pytest.mark.parametrize(
    "grammar",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}},
        {"grammar": "start: start"},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_cannot_be_followed_is_the_clients_fault(server, grammar, stream):
    pytest.importorskip("llguidance")
    asked = body(max_tokens=8, stream=stream, **grammar)
    refused(httpx.post(server + COMPLETIONS, json=asked, timeout=60), 400, param=next(iter(grammar)))
