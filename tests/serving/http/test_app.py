"""The endpoints, through the application and without a socket."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
from fastapi.testclient import TestClient

from attar.serving.http.app import create_app
from attar.serving.http.endpoints import TextOffsets
from attar.serving.http.settings import ServerSettings
from tests.serving.http.fake import ANSWER, BUG, BUSY, FAIL, FakeBackend, FakeTokenizer


def serve(backend=None, **settings):
    backend = backend or FakeBackend()
    app = create_app(backend, ServerSettings(**settings), tokenizer=FakeTokenizer(), model="tiny")
    return TestClient(app, base_url="http://localhost", raise_server_exceptions=False), backend


def complete(client, **body):
    return client.post("/v1/completions", json={"model": "tiny", "prompt": "hi", **body})


def chat(client, **body):
    lines = [{"role": "user", "content": "hi"}]
    return client.post("/v1/chat/completions", json={"model": "tiny", "messages": lines, **body})


def chunks(response):
    """The JSON of a stream; it must end with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = [part for part in response.text.split("\n\n") if part and not part.startswith(":")]
    assert all(part.startswith("data: ") for part in parts) and parts[-1] == "data: [DONE]"
    return [json.loads(part[6:]) for part in parts[:-1]]


def error(response, status, code=None, param=None):
    assert response.status_code == status, response.text
    detail = response.json()["error"]
    assert set(detail) == {"message", "type", "param", "code"} and detail["message"]
    if code:
        assert detail["code"] == code, detail
    if param:
        assert detail["param"] == param, detail
    return detail


def test_completion():
    client, backend = serve()
    body = complete(client, max_tokens=50).json()
    assert body["object"] == "text_completion" and body["model"] == "tiny"
    assert body["choices"] == [
        {"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 13,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert backend.asked[0][0] == (256, *b"hi")


def test_a_completion_has_16_tokens_by_default():
    client, _ = serve(FakeBackend(answer="x" * 90))
    body = complete(client).json()
    assert len(body["choices"][0]["text"]) == 16 and body["choices"][0]["finish_reason"] == "length"
    assert chat(client).json()["choices"][0]["message"]["content"] == "x" * 90
    assert chat(client, max_completion_tokens=5).json()["usage"]["completion_tokens"] == 5


def test_prompts_times_n():
    client, _ = serve()
    body = complete(client, prompt=["a", "bc"], n=2, echo=True, max_tokens=4).json()
    assert [choice["text"] for choice in body["choices"]] == ["aHell", "aHell", "bcHell", "bcHell"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 5 and body["usage"]["completion_tokens"] == 16
    assert complete(client, prompt=[[104, 105], [7]], max_tokens=1).json()["usage"]["prompt_tokens"] == 3
    assert complete(client, prompt=[104, 105], echo=True, max_tokens=1).json()["choices"][0]["text"] == "hiH"


def test_parameters_reach_the_engine():
    client, backend = serve(request_s=9.0, priority=True)
    complete(
        client,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        seed=-1,
        stop="x",
        logit_bias={"7": -3},
        presence_penalty=1,
        frequency_penalty=-1,
        priority=4,
        response_format={"type": "json_object"},
    ).raise_for_status()
    _, params, options = backend.asked[0]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 0, 0.1)
    assert params.seed == 2**64 - 1 and params.stop == ("x",) and params.biases == ((7, -3.0),)
    assert params.json_schema == '{"type": "object"}' and params.presence_penalty == 1
    assert options == {"priority": 4, "deadline_s": 9.0, "salt": ""}


def test_completion_stream():
    client, _ = serve()
    response = complete(client, stream=True, n=2, max_tokens=50, echo=True)
    result = chunks(response)
    for index in (0, 1):
        mine = [item["choices"][0] for item in result if item["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "hi" + ANSWER
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
    assert len({item["id"] for item in result}) == 1 and all("usage" not in item for item in result)


def test_usage_is_in_the_last_chunk_only_where_asked_for():
    client, _ = serve()
    for response in (
        complete(client, stream=True, stream_options={"include_usage": True}, max_tokens=4),
        chat(client, stream=True, stream_options={"include_usage": True}, max_tokens=4),
    ):
        *result, last = chunks(response)
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4
        assert all(item["usage"] is None and item["choices"] for item in result)


def test_chat_stream():
    client, _ = serve()
    items = [chunk["choices"][0] for chunk in chunks(chat(client, stream=True))]
    assert items[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(choice["delta"].get("content", "") for choice in items) == ANSWER
    assert items[-1]["delta"] == {} and items[-1]["finish_reason"] == "stop"


def test_chat_logprobs():
    client, _ = serve()
    body = chat(client, logprobs=True, top_logprobs=3, max_tokens=1).json()
    assert body["choices"][0]["logprobs"]["content"] == [
        {
            "token": "H",
            "logprob": -0.5,
            "bytes": [72],
            "top_logprobs": [
                {"token": "H", "logprob": -0.5, "bytes": [72]},
                {"token": "\ufffd", "logprob": -1.0, "bytes": [195]},
                {"token": "\x07", "logprob": -9999.0, "bytes": [7]},
            ],
        }
    ]
    streamed = chunks(chat(client, logprobs=True, stream=True, max_tokens=2))
    scored = [item["choices"][0]["logprobs"] for item in streamed]
    assert sum(len(item["content"]) for item in scored if item) == 2


def test_completion_logprobs_and_echo():
    client, _ = serve()
    scores = complete(client, logprobs=2, max_tokens=2).json()["choices"][0]["logprobs"]
    assert scores["tokens"] == ["H", "e"] and scores["text_offset"] == [0, 1]
    assert scores["top_logprobs"][0] == {"H": -0.5, "bytes:\\xc3": -1.0}
    body = complete(client, logprobs=0, echo=True, max_tokens=1).json()["choices"][0]
    assert body["text"] == "hiH" and body["logprobs"]["tokens"] == ["", "h", "i", "H"]
    assert body["logprobs"]["token_logprobs"] == [None, -1.0, -1.0, -0.5]
    assert body["logprobs"]["top_logprobs"][0] is None
    assert body["logprobs"]["text_offset"] == [0, 0, 1, 2]
    streamed = chunks(complete(client, logprobs=0, stream=True, max_tokens=3))
    assert [o for item in streamed for o in item["choices"][0]["logprobs"]["text_offset"]] == [0, 1, 2]


def test_offsets_count_characters_of_the_text():
    """Not the letters of ``bytes:\\xc3``, special tokens that are left out, or a blank that is dropped."""
    client, _ = serve()
    body = complete(client, prompt="h\u00e9", logprobs=0, echo=True, max_tokens=1).json()["choices"][0]
    assert body["text"] == "h\u00e9H" and body["logprobs"]["text_offset"] == [0, 0, 1, 1, 2]

    class Marked(FakeTokenizer):
        def piece(self, id):
            return ("<s>", b"<s>") if id == 256 else super().piece(id)

        def special_token(self, text):
            return 256 if text == "<s>" else None

    ids = [256, *b" a", 256, 98]
    for text, special, offsets in (
        ("a<s>b", False, [0, 0, 0, 1, 4]),
        ("ab", False, [0, 0, 0, 1, 1]),
        (" ab", False, [0, 0, 1, 2, 2]),
        (None, False, [0, 0, 1, 2, 2]),
        (None, True, [0, 3, 4, 5, 8]),
    ):
        counted = TextOffsets(Marked(), text, special)
        assert [counted.add(token) for token in ids] == offsets, text


@pytest.mark.few(10)
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"top_p": -0.1}, "top_p"),
        ({"stop": ["x"] * 1000}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": "x" * 10_000}, "stop"),
        ({"logit_bias": {"7": 101}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"seed": 2**70}, "seed"),
        ({"min_tokens": 100, "max_tokens": 50}, "min_tokens"),
        ({"stop_token_ids": [257]}, "stop_token_ids"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"nonsense": 1}, "nonsense"),
        ({"model": None}, "model"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"priority": 1}, "priority"),
        ({"stop": [1]}, "stop"),
        ({"stop": {}}, "stop"),
        ({"logit_bias": {str(token): 1 for token in range(301)}}, "logit_bias"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
    ],
)
def test_wrong_values_are_400_and_name_the_field(body, param):
    client, backend = serve()
    for ask in (complete, chat):
        message = error(ask(client, **body), 400)
        assert param is None or message["param"].startswith(param), message
    assert backend.asked == []


@pytest.mark.few(6)
@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": ["a", ""]},
        {"prompt": [1.5]},
        {"prompt": [-1]},
        {"prompt": [257]},
        {"prompt": None},
        {"suffix": "x"},
        {"best_of": 3},
        {"prompt": ["a"] * 65},
        {"logprobs": 101},
        {"prompt": "\ud800"},
        {"echo": True, "logprobs": 1, "stream": True},
    ],
)
def test_wrong_completions(body):
    client, backend = serve()
    content = json.dumps({"model": "tiny", "prompt": "hi", **body})
    response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    error(response, 400)
    assert backend.asked == []


@pytest.mark.few(6)
@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": [{"role": "pirate", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "function", "content": "x"}]},
        {"messages": [{"role": "user", "content": "\udfff"}]},
        {"tools": [{"type": "function", "function": {"name": "f g"}}]},
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        {"tool_choice": "required"},
        {"functions": [{"name": "f"}]},
        {"top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 21},
        {"modalities": ["audio"]},
    ],
)
def test_wrong_chats(body):
    client, backend = serve()
    content = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **body})
    headers = {"content-type": "application/json"}
    error(client.post("/v1/chat/completions", content=content, headers=headers), 400)
    assert backend.asked == []


def test_messages_in_parts():
    client, backend = serve()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat(client, messages=[{"role": "developer", "content": parts}, {"role": "user", "content": "c"}])
    assert bytes(backend.asked[0][0][1:]) == b"system: ab\nuser: c\n"


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "content", [b"{", b"", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"n":' + b"9" * 9999]
)
def test_bodies_that_are_no_json(content):
    client, _ = serve()
    headers = {"content-type": "application/json"}
    error(client.post("/v1/completions", content=content, headers=headers), 400)


def test_unknown_model_and_path():
    client, _ = serve()
    error(complete(client, model="gpt-9"), 404, "model_not_found", "model")
    error(client.get("/v1/models/x/y"), 404, "model_not_found")
    assert "GET /v1/nothing" in error(client.get("/v1/nothing"), 404)["message"]
    assert "DELETE /v1/models" in error(client.delete("/v1/models"), 405)["message"]
    assert len(error(client.get("/" + 5000 * "x"), 404)["message"]) <= 200
    error(client.get("/v1/completions"), 405)
    assert client.get("/v1/models/tiny").json()["max_model_len"] == 100
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["tiny"]


def test_a_prompt_that_is_too_long():
    client, backend = serve()
    error(complete(client, prompt="x" * 99), 400, "context_length_exceeded")
    error(chat(client, messages=[{"role": "user", "content": "x" * 99}]), 400, "context_length_exceeded")
    assert backend.asked == []
    assert complete(client, prompt="x" * 98).status_code == 200


@pytest.mark.slow
def test_a_body_of_50_mb():
    client, backend = serve(max_body=100_000)
    big = json.dumps({"model": "tiny", "prompt": "x" * 50_000_000}).encode()
    headers = {"content-type": "application/json"}
    error(client.post("/v1/completions", content=big, headers=headers), 413)

    def pieces():
        yield from (big[start : start + 65536] for start in range(0, 1_000_000, 65536))

    error(client.post("/v1/completions", content=pieces(), headers=headers), 413)
    assert backend.asked == []


def test_keys():
    client, backend = serve(api_key=("secret-one", "secret-two"))
    error(complete(client), 401, "invalid_api_key")
    error(client.get("/metrics"), 401)
    for wrong in ("Bearer secret-on", "Bearer ", "Basic secret-one", "Bearer secret-ö"):
        error(client.get("/v1/models", headers={"Authorization": wrong.encode("latin-1")}), 401)
    assert client.get("/health").status_code == client.get("/ready").status_code == 200
    for key in ("secret-one", "secret-two"):
        client.headers["Authorization"] = f"Bearer {key}"
        assert complete(client).status_code == 200
    salts = [options["salt"] for _, _, options in backend.asked]
    assert len(set(salts)) == 2 and "" not in salts and "secret" not in "".join(salts)


def test_a_full_queue_is_429_with_retry_after():
    client, backend = serve(max_queue=4)
    backend.waiting = 4
    response = complete(client)
    error(response, 429, "queue_full")
    assert 1 <= int(response.headers["retry-after"]) <= 60
    backend.waiting = 2
    error(complete(client, prompt=["a", "b", "c"]), 429)
    assert complete(client).status_code == 200
    for stream in (False, True):  # the engine's own limit
        response = complete(client, prompt=[BUSY], stream=stream)
        error(response, 429, "queue_full")
        assert response.headers["retry-after"]


def test_a_model_that_fails():
    client, backend = serve()
    assert "secret" not in error(complete(client, prompt=[FAIL], max_tokens=20), 500)["message"]
    *result, last = chunks(complete(client, prompt=[FAIL], max_tokens=20, stream=True))
    assert "".join(item["choices"][0]["text"] for item in result) == "Hel"
    assert last["error"]["type"] == "server_error"
    assert not backend.open
    assert complete(client).status_code == 200


def test_a_bug_is_500_in_the_same_shape_and_the_server_lives():
    client, backend = serve()
    for stream in (False, True):
        error(complete(client, prompt=[BUG], stream=stream), 500)
    assert client.app.state.service.admission.active == 0
    assert complete(client).status_code == 200 and not backend.open


def test_tokenize_and_back():
    client, _ = serve()
    body = client.post("/tokenize", json={"prompt": "hi"}).json()
    assert body == {"count": 3, "max_model_len": 100, "tokens": [256, 104, 105]}
    plain = client.post("/tokenize", json={"prompt": "hi", "add_special_tokens": False}).json()
    assert client.post("/detokenize", json={"tokens": plain["tokens"]}).json()["prompt"] == "hi"
    message = client.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert bytes(message["tokens"][1:]) == b"user: x\n"
    error(client.post("/tokenize", json={}), 400)
    error(client.post("/detokenize", json={"tokens": [999]}), 400)


def test_health_and_ready():
    client, backend = serve()
    client.app.state.service.admission.draining = True
    assert client.get("/health").status_code == 200 and client.get("/ready").status_code == 503
    response = complete(client)
    error(response, 503, "shutting_down")
    assert response.headers["retry-after"]
    backend.alive = False
    assert client.get("/health").status_code == 503


def test_the_engine_is_closed_with_the_application():
    client, backend = serve()
    with client:
        assert not backend.closed
    assert backend.closed


def test_what_is_published_is_openapi():
    client, _ = serve()
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/metrics"} <= set(paths)
    assert "default" in paths["/v1/completions"]["post"]["responses"]


@pytest.mark.parametrize(
    "path, builder, body",
    [
        ("/v1/completions", "endpoints.CompletionBuilder", {"prompt": "hi"}),
        (
            "/v1/chat/completions",
            "chat_endpoint.ChatBuilder",
            {"messages": [{"role": "user", "content": "x"}]},
        ),
        ("/v1/responses", "responses_api.endpoint.ResponseOutput", {"input": "hi"}),
        ("/v1/responses", "responses_api.endpoint.repeated_fields", {"input": "hi"}),
    ],
)
def test_a_builder_that_fails_leaves_no_request_open(monkeypatch, path, builder, body):
    client, backend = serve()

    def fail(*arguments, **options):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(f"attar.serving.http.{builder}", fail)
    for stream in (False, True):
        error(client.post(path, json={"model": "tiny", "stream": stream, **body}), 500)
    admission = client.app.state.service.admission
    assert not admission.active and not admission._completions and not backend.open
