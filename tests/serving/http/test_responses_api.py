"""/v1/responses, with the official client against a scripted model, and with a real one."""

from __future__ import annotations

import json
from contextlib import contextmanager
from functools import partial

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
import httpx

from attar.serving.http import app as app_module
from attar.serving.http.app import create_app
from attar.serving.http.responses_api.endpoint import ResponseStore
from attar.serving.http.responses_api.items import messages_of
from attar.serving.http.responses_api.protocol import InputItem
from attar.serving.http.settings import ServerSettings
from tests.serving.http.fake import ANSWER, FAIL, FakeBackend, FakeTokenizer
from tests.serving.http.real import refused, serving
from tests.serving.http.test_live import running_app

THINKS = "<think>Hm.</think>Let me look.<tool_call>" + json.dumps({"name": "f", "arguments": {"a": 1}})
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


class EchoTokenizer(FakeTokenizer):
    """Keeps the last conversation."""

    def chat(self, messages, options=None):
        self.messages = messages
        ids = super().chat(messages, options)
        return [FAIL] if "fail" in messages[-1]["content"] else ids


@contextmanager
def scripted(answer=ANSWER, **settings):
    backend, result = FakeBackend(context=4000, answer=answer), ServerSettings(port=0, **settings)
    tokenizer = EchoTokenizer("<tool_call> tools </think>")
    app = create_app(backend, result, tokenizer=tokenizer, model="tiny")
    with running_app(app, result) as (url, _):
        yield url, backend, tokenizer


def client_of(url, key="none"):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def ask(url, **body):
    return httpx.post(f"{url}/v1/responses", json={"model": "tiny", "input": "hi", **body}, timeout=30)


def test_the_official_client_gets_a_response():
    with scripted() as (url, backend, tokenizer):
        answer = client_of(url).responses.create(
            model="tiny", input="hi", instructions="Be brief.", max_output_tokens=50, temperature=0.5
        )
    assert answer.output_text == ANSWER and answer.status == "completed" and answer.error is None
    assert [item.type for item in answer.output] == ["message"] and answer.output[0].status == "completed"
    assert answer.usage.output_tokens == 13 and answer.usage.input_tokens_details.cached_tokens == 3
    assert answer.usage.total_tokens == answer.usage.input_tokens + 13
    assert [(m["role"], m["content"]) for m in tokenizer.messages] == [
        ("system", "Be brief."),
        ("user", "hi"),
    ]
    params = backend.asked[0][1]
    assert params.max_tokens == 50 and params.temperature == 0.5


def test_the_official_client_streams_events_in_their_order():
    with scripted() as (url, _, _), client_of(url).responses.stream(model="tiny", input="hi") as stream:
        events = list(stream)
        final = stream.get_final_response()
    names = [event.type for event in events]
    deltas = len(ANSWER)
    assert names == [
        *("response.created", "response.in_progress", "response.output_item.added"),
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == ANSWER and final.usage.output_tokens == 13
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == ANSWER


def test_reasoning_text_and_calls_are_items():
    with scripted(THINKS) as (url, _, _):
        whole = client_of(url).responses.create(model="tiny", input="hi", tools=[TOOL])
        text = ask(url, tools=[TOOL], stream=True).text
        with client_of(url).responses.stream(model="tiny", input="hi", tools=[TOOL]) as stream:
            final = stream.get_final_response()
    for answer in (whole, final):
        reasoning, message, call = answer.output
        assert reasoning.type == "reasoning" and reasoning.content[0].text == "Hm."
        assert message.content[0].text == "Let me look."
        assert (call.type, call.name, call.arguments) == ("function_call", "f", '{"a": 1}')
        assert call.call_id != call.id and answer.usage.output_tokens_details.reasoning_tokens > 3
    parts = [part.split("\n") for part in text.strip().split("\n\n")]
    events = [json.loads(data[6:]) for _, data in parts]
    assert all(name == f"event: {event['type']}" for (name, _), event in zip(parts, events, strict=True))
    assert "[DONE]" not in text
    called = [event for event in events if "function_call_arguments" in event["type"]]
    assert "".join(event.get("delta", "") for event in called) == called[-1]["arguments"] == '{"a": 1}'
    assert [e["output_index"] for e in events if e["type"] == "response.output_item.added"] == [0, 1, 2]


def test_results_of_calls_go_back():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "what"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "r"}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
    ]
    messages = [m.plain() for m in messages_of([InputItem.model_validate(item) for item in items], None)]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[1]["content"] == "t" and messages[1]["reasoning_content"] == "r"
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["c1", "c2"]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert [(m["tool_call_id"], m["content"]) for m in messages[2:]] == [("c1", "one"), ("c2", "two")]


def test_a_response_goes_on_from_another():
    with scripted() as (url, _, tokenizer):
        client = client_of(url)
        first = client.responses.create(model="tiny", input="one", instructions="I.")
        client.responses.create(model="tiny", input="two", previous_response_id=first.id)
        said = [(message["role"], message["content"]) for message in tokenizer.messages]
        assert said == [("user", "one"), ("assistant", ANSWER), ("user", "two")], "without its instructions"
        assert client.responses.retrieve(first.id).output_text == ANSWER
        client.responses.delete(first.id)
        refused(ask(url, previous_response_id=first.id), 404, "previous_response_not_found")
        streamed = ask(url, stream=True).text
        id = json.loads(streamed.split("data: ")[1].split("\n")[0])["response"]["id"]
        assert ask(url, previous_response_id=id).status_code == 200
        unkept = ask(url, store=False).json()
        assert not unkept["store"]
        refused(ask(url, previous_response_id=unkept["id"]), 404)


def test_responses_of_others_are_not_found():
    with scripted(api_key=("secret-one", "secret-two")) as (url, _, _):
        mine = client_of(url, "secret-one").responses.create(model="tiny", input="one")
        openai = pytest.importorskip("openai")
        for path in (lambda c: c.responses.retrieve(mine.id), lambda c: c.responses.delete(mine.id)):
            with pytest.raises(openai.NotFoundError):
                path(client_of(url, "secret-two"))
        assert client_of(url, "secret-one").responses.retrieve(mine.id).id == mine.id


def test_the_store_is_bounded():
    store = ResponseStore(most=2, bytes=400)
    for number in range(4):
        store.keep("me", [{"n": number}], {"id": str(number)})
    assert len(store) == 2 and store.get("me", "1") is None and store.get("me", "3") is not None
    assert store.get("you", "3") is None and not store.delete("you", "3")
    store.keep("me", [{"text": "x" * 350}], {"id": "large"})
    assert len(store) == 1
    store.keep("me", [{"text": "x" * 500}], {"id": "too large"})
    assert store.get("me", "too large") is None and store.get("me", "large") is not None
    assert store.bytes > 350 and store.delete("me", "large") and store.bytes == 0


def test_a_caller_cannot_evict_another_s_responses(monkeypatch):
    monkeypatch.setattr(app_module, "ResponseStore", partial(ResponseStore, 8))
    keys = ("secret-one", "secret-two")
    with scripted(api_key=keys) as (url, _, _):
        one, two = ({"Authorization": f"Bearer {key}"} for key in keys)
        mine = httpx.post(f"{url}/v1/responses", json={"model": "tiny", "input": "a"}, headers=one).json()
        asked = {"model": "tiny", "input": "b", "max_output_tokens": 1}
        with httpx.Client(headers=two) as http:
            for _ in range(9):
                last = http.post(f"{url}/v1/responses", json=asked).json()
        for id, headers, status in ((mine, one, 200), (mine, two, 404), (last, two, 200)):
            assert httpx.get(f"{url}/v1/responses/{id['id']}", headers=headers).status_code == status


def test_the_end_tells_why():
    with scripted() as (url, _, _):
        cut = ask(url, max_output_tokens=3).json()
        assert cut["status"] == "incomplete" and cut["incomplete_details"] == {"reason": "max_output_tokens"}
        assert cut["output"][0]["status"] == "incomplete" and cut["output"][0]["content"][0]["text"] == "Hel"
        assert ask(url, max_output_tokens=3, stream=True).text.count("event: response.incomplete\n") == 1
        refused(ask(url, input="fail"), 500)
        failed = ask(url, input="fail", stream=True).text
        last = json.loads(failed.strip().split("\n\n")[-1].split("data: ")[1])
        assert last["type"] == "response.failed" and last["response"]["error"]["message"]


def test_formats_and_choices_are_those_of_chats():
    with scripted() as (url, backend, _):
        schema = {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}
        assert ask(url, text={"format": schema}).json()["text"]["format"]["schema"] == {"type": "object"}
        ask(url, tools=[TOOL], tool_choice={"type": "function", "name": "f"}).raise_for_status()
        ask(url, text={"format": {"type": "json_object"}}).raise_for_status()
        params = [params for _, params, _ in backend.asked]
        assert params[0].json_schema == '{"type": "object"}' and "<tool_call>" in params[1].grammar
        assert params[2].json_schema == '{"type": "object"}'


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "pirate", "content": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({"conversation": "x"}, "conversation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_wrong_requests_are_named(body, param):
    with scripted() as (url, backend, _):
        assert refused(ask(url, **body), 400)["param"].startswith(param)
        assert backend.asked == []


def test_fields_without_effect_are_named():
    with scripted() as (url, _, _):
        answer = ask(url, user="me", include=["reasoning.encrypted_content"], store=True, metadata={"a": "b"})
        assert answer.headers["x-ignored-fields"] == "user, include" and answer.json()["metadata"] == {
            "a": "b"
        }


def test_a_real_model_responds():
    with serving() as (url, _, _):
        answer = client_of(url).responses.create(
            model="tiny", input="hi", max_output_tokens=60, tools=[{**TOOL, "parameters": {
                "type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["n"], "additionalProperties": False}}], tool_choice="required",
            parallel_tool_calls=False,
        )  # fmt: skip
        [call] = answer.output
        assert call.type == "function_call" and set(json.loads(call.arguments)) == {"n"}
