"""/v1/messages, with the official client against a scripted model, and with a real one."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
import httpx

from attar.runtime.loading import load
from attar.serving.http.anthropic.endpoint import input_of
from attar.serving.http.app import create_app
from attar.serving.http.settings import ServerSettings
from tests.serving.http.fake import ANSWER, BUSY, FAIL, SLOW, FakeBackend, FakeTokenizer
from tests.serving.http.real import serving
from tests.serving.http.test_live import running_app, until

anthropic = pytest.importorskip("anthropic")
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
THINKS = f"<think>Hm.</think>Let me look.{CALL}"
TOOL = {"name": "f", "description": "A tool.", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "hi"}
FIRST = {"fail": FAIL, "busy": BUSY, "slow": SLOW}


class EchoTokenizer(FakeTokenizer):
    """Keeps the last conversation; a last word may make trouble."""

    def chat(self, messages, options=None):
        self.messages = messages
        ids = super().chat(messages, options)
        trouble = FIRST.get(messages[-1]["content"])
        return [trouble] if trouble else ids


@contextmanager
def scripted(answer=ANSWER, template="<tool_call> tools </think>", context=4000, **settings):
    backend, result = FakeBackend(context=context, answer=answer), ServerSettings(port=0, **settings)
    tokenizer = EchoTokenizer(template)
    app = create_app(backend, result, tokenizer=tokenizer, model="tiny")
    with running_app(app, result) as (url, _):
        yield url, backend, tokenizer


@pytest.fixture(scope="module")
def server():
    """A server whose answers are text, and its parts."""
    with scripted() as parts:
        yield parts


@pytest.fixture(scope="module")
def agent():
    """A server whose answers think, speak and call."""
    with scripted(THINKS) as parts:
        yield parts


def client_of(url, **options):
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, **options)


def create(url, **body):
    fields = {"model": "tiny", "max_tokens": 200, "messages": [USER], **body}
    return client_of(url).messages.create(**fields)


def ask(url, path="/v1/messages", **body):
    fields = {"model": "tiny", "max_tokens": 200, "messages": [USER], **body}
    return httpx.post(url + path, json={k: v for k, v in fields.items() if v != "absent"}, timeout=30)


def refused(response, status=400, kind="invalid_request_error"):
    """The message of an error, which must be in Anthropic's form and in one line."""
    assert response.status_code == status, (response.status_code, response.text[:300])
    body = response.json()
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message"} and body["error"]["type"] == kind, body
    assert body["error"]["message"] and "\n" not in body["error"]["message"]
    assert response.headers["request-id"] == body["request_id"]
    return body["error"]["message"]


def said(tokenizer):
    return [(message["role"], message["content"]) for message in tokenizer.messages]


def test_the_official_client_gets_a_message(server):
    url, backend, tokenizer = server
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7}  # which the client takes no more
    answer = create(url, system="Be brief.", metadata={"user_id": "me"}, extra_body=sampling)
    assert [block.type for block in answer.content] == ["text"] and answer.content[0].text == ANSWER
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert (answer.role, answer.type, answer.model) == ("assistant", "message", "tiny")
    prompt = len(backend.asked[-1][0])
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (prompt - 3, 3)
    assert answer.usage.output_tokens == 13 and answer._request_id
    assert said(tokenizer) == [("system", "Be brief."), ("user", "hi")]
    params = backend.asked[-1][1]
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (200, 0.5, 0.9, 7)


def test_the_official_client_streams_events_in_their_order(server):
    with client_of(server[0]).messages.stream(model="tiny", max_tokens=200, messages=[USER]) as stream:
        events = list(stream)
        final = stream.get_final_message()
    names = [event.type for event in events if event.type != "text"]  # which the client adds
    assert names == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * len(ANSWER),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert final.content[0].text == ANSWER and final.stop_reason == "end_turn"
    assert (final.usage.output_tokens, final.usage.cache_read_input_tokens) == (13, 3)
    assert events[0].message.usage.input_tokens == final.usage.input_tokens + 3


def test_thinking_text_and_calls_are_blocks(agent):
    url, _, tokenizer = agent
    complete = create(url, tools=[TOOL])
    fields = {"model": "tiny", "max_tokens": 200, "messages": [USER], "tools": [TOOL]}
    with client_of(url).messages.stream(**fields) as stream:
        final = stream.get_final_message()
    for answer in (complete, final):
        thinking, text, call = answer.content
        assert (thinking.type, thinking.thinking) == ("thinking", "Hm.") and thinking.signature
        assert (text.type, text.text) == ("text", "Let me look.")
        assert (call.type, call.name, call.input) == ("tool_use", "f", {"a": 1})
        assert answer.stop_reason == "tool_use" and answer.usage.output_tokens_details.thinking_tokens > 3
    events = [part.split("\n") for part in ask(url, tools=[TOOL], stream=True).text.strip().split("\n\n")]
    bodies = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert [name for name, _ in events] == [f"event: {body['type']}" for body in bodies]
    starts = [body for body in bodies if body["type"] == "content_block_start"]
    assert [start["index"] for start in starts] == [0, 1, 2] and starts[2]["content_block"]["input"] == {}
    back = [USER, {"role": "assistant", "content": [block.model_dump() for block in complete.content]}]
    result = {"type": "tool_result", "tool_use_id": complete.content[2].id, "content": "one"}
    create(url, tools=[TOOL], messages=[*back, {"role": "user", "content": [result]}])
    _, answered, told = tokenizer.messages
    assert (answered["content"], answered["reasoning_content"]) == ("Let me look.", "Hm.")
    assert answered["tool_calls"][0]["id"] == told["tool_call_id"] == complete.content[2].id
    assert (told["role"], told["content"]) == ("tool", "one")


def test_the_end_tells_why(server, agent):
    cut = create(server[0], max_tokens=3)
    assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "Hel")
    partial = create(agent[0], tools=[TOOL], max_tokens=len(THINKS) - 13)
    assert (partial.stop_reason, partial.content[-1].input) == ("max_tokens", {"a": 1})
    assert input_of('{"a": [1, "xy') == {"a": [1, "xy"]} and input_of("[1]") == {"arguments": [1]}
    assert create(agent[0], thinking={"type": "disabled"}, tools=[TOOL]).content[0].type == "text"
    omitted = {"type": "adaptive", "display": "omitted"}
    assert create(agent[0], thinking=omitted, tools=[TOOL]).content[0].type == "text"


def test_a_stop_sequence_is_named():
    with serving() as (url, _, _):
        free = create(url, max_tokens=24, extra_body={"temperature": 0}).content[0].text
        stop = free[4:7]
        answer = create(url, max_tokens=24, stop_sequences=["@@@", stop], extra_body={"temperature": 0})
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in answer.content) == free.partition(stop)[0]


def test_more_tokens_than_fit_are_as_many_as_fit():
    """Agents send a constant. Of chat completions such a limit is refused."""
    with serving(model=load("attar:tiny", kv_tokens=64)) as (url, _, _):
        for stream in (False, True):
            body = {"max_tokens": 8000, "extra_body": {"temperature": 0}, "messages": [USER]}
            if stream:
                with client_of(url).messages.stream(model="tiny", **body) as events:
                    answer = events.get_final_message()
            else:
                answer = create(url, **body)
            assert answer.stop_reason == "model_context_window_exceeded"
            assert 40 < answer.usage.output_tokens + answer.usage.input_tokens <= 65
        assert "key-value pool" in refused(ask(url, system="x y " * 80))


def test_choices_of_tools_become_grammars(agent):
    url, backend, tokenizer = agent
    tools = [TOOL, {**TOOL, "name": "g", "cache_control": {"type": "ephemeral"}, "strict": True}]
    create(url, tools=tools, tool_choice={"type": "tool", "name": "g"})
    create(url, tools=tools, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    create(url, tools=tools, tool_choice={"type": "auto"})
    create(url, tools=tools, tool_choice={"type": "none"})
    named, forced, free, none = (params.grammar for _, params, _ in backend.asked[-4:])
    assert '"g' in named.replace("\\", "") and "call){0," not in forced and "{0," not in named
    assert free is none is None and not tokenizer.options.tools
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    create(url, output_config={"format": schema, "effort": "low"})
    assert backend.asked[-1][1].json_schema == '{"type": "object"}'


def test_thinking_is_what_the_template_has_for_it():
    with scripted(template="</think> reasoning_effort") as (url, _, tokenizer):
        for fields, effort, switch in (
            ({}, None, None),
            ({"thinking": {"type": "disabled"}}, "none", False),
            ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "low", True),
            ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "medium", True),
            ({"thinking": {"type": "enabled", "budget_tokens": 9000}}, "high", True),
            ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "high", True),
        ):
            ask(url, **fields).raise_for_status()
            variables = tokenizer.options.variables
            assert variables.get("reasoning_effort") == effort, fields
            assert variables.get("enable_thinking") is variables.get("thinking") is switch, fields


def test_tokens_are_counted_as_the_prompt_has_them(server):
    url, backend, _ = server
    fields = {"model": "tiny", "system": "Be brief.", "messages": [USER], "tools": [TOOL]}
    count = client_of(url).messages.count_tokens(**fields).input_tokens
    create(url, **fields)
    assert count == len(backend.asked[-1][0])


def test_models_have_anthropics_form(server):
    client = client_of(server[0])
    [model] = client.models.list()
    assert (model.id, model.type, model.max_input_tokens) == ("tiny", "model", 4000)
    assert client.models.retrieve("tiny").created_at == model.created_at
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("x")
    assert httpx.get(f"{server[0]}/v1/models").json()["object"] == "list"


def test_blocks_become_messages(server):
    url, _, tokenizer = server
    image = {"type": "image", "source": {}}
    call = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": "ü"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "no"}]}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": []},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, call]},
        {"role": "system", "content": "Now in French."},
        {"role": "user", "content": [{**result, "is_error": True}, {"type": "text", "text": "c"}]},
    ]
    billing = "x-anthropic-billing-header: cc_version=2.1; cch=1f;"
    system = [{"type": "text", "text": text} for text in (billing, "One.", "Two.")]
    ask(url, messages=messages, system=system, tools=[TOOL]).raise_for_status()
    assert said(tokenizer) == [
        ("system", "One.\n\nTwo."),
        ("user", "a\n\nb"),
        ("assistant", ""),
        ("system", "Now in French."),
        ("tool", "Error: no"),
        ("user", "c"),
    ]
    assert tokenizer.messages[2]["tool_calls"][0]["function"]["arguments"] == '{"a": "ü"}'
    ask(url, system=f"{billing}\nOne.").raise_for_status()
    assert said(tokenizer)[0] == ("system", "One.")
    message = refused(ask(url, messages=[{"role": "user", "content": [image]}]))
    assert "'image' cannot be read here" in message and "messages.0.content.0.type" in message
    ask(url, messages=[USER, {"role": "assistant", "content": "Once"}]).raise_for_status()
    assert tokenizer.options.continued and said(tokenizer)[-1] == ("assistant", "Once")


ASSISTANT = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "x"}


def of_user(*blocks):
    return {"role": "user", "content": list(blocks)}


@pytest.mark.few(14)
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [None]}, "messages.0"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [of_user({"type": "text", "text": ""})]}, "messages.0.content.0"),
        ({"messages": [of_user({"type": "text", "text": None})]}, "messages.0.content.0.text"),
        ({"messages": [of_user({"type": "text"})]}, "messages.0.content.0.text"),
        ({"messages": [of_user({"text": "x"})]}, "messages.0.content.0.type"),
        ({"messages": [of_user({"type": "document", "source": {}})]}, "messages.0.content.0.type"),
        ({"messages": [of_user({"type": ["text"]})]}, "messages.0.content.0.type"),
        ({"messages": [of_user({"type": "thinking", "thinking": "x"})]}, "messages.0.content.0.type"),
        ({"messages": [of_user("x")]}, "messages.0.content.0"),
        ({"messages": [of_user(RESULT)]}, "messages.0.content.0.tool_use_id"),
        ({"messages": [USER, ASSISTANT]}, "messages.1.content.0"),
        ({"messages": [USER, ASSISTANT, USER]}, "messages.1.content.0"),
        ({"messages": [USER, ASSISTANT, of_user(RESULT, RESULT)]}, "messages.2.content.1.tool_use_id"),
        (
            {"messages": [USER, ASSISTANT, of_user({"type": "text", "text": "x"}, RESULT)]},
            "messages.2.content.1",
        ),
        ({"messages": [USER, ASSISTANT, ASSISTANT, of_user(RESULT)]}, "messages.2.content.0.id"),
        (
            {"messages": [USER, ASSISTANT, of_user({**RESULT, "content": [{"type": "image"}]})]},
            "messages.2.content.0.content.0.type",
        ),
        ({"messages": [USER, {"role": "assistant", "content": [RESULT]}]}, "messages.1.content.0.type"),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "c"}]}]},
            "messages.1.content.0.name",
        ),
        ({"system": [{"type": "image"}]}, "system.0.type"),
        ({"system": 3}, "system"),
        ({"max_tokens": "absent"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "200"}, "max_tokens"),
        ({"temperature": "1"}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools.0.name"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"model": None}, "model"),
    ],
)
def test_wrong_requests_are_named(server, body, param):
    url, backend, _ = server
    before = len(backend.asked)
    assert f"'{param}" in refused(ask(url, **body))
    assert len(backend.asked) == before


def test_hostile_bodies_are_refused_in_a_line(server):
    url, _, _ = server
    nested = {}
    for _ in range(200):
        nested = {"a": nested}
    call = {"type": "tool_use", "id": "c", "name": "f", "input": nested}
    assert "levels deep" in refused(ask(url, messages=[USER, {"role": "assistant", "content": [call]}]))
    assert "nested" in refused(ask(url, tools=[{**TOOL, "input_schema": nested}]))
    many = [{"type": "text", "text": "x"}] * 9000
    assert "more than" in refused(ask(url, messages=[{"role": "user", "content": many}]))
    headers = {"content-type": "application/json"}
    for raw in (b"", b"[]", b"{", b'{"model": "\\ud800"}', b"[" * 100_000):
        refused(httpx.post(f"{url}/v1/messages", content=raw, headers=headers))
    assert "prompt is too long: " in refused(ask(url, system="x" * 5000))
    refused(ask(url, model="x"), 404, "not_found_error")
    refused(httpx.get(f"{url}/v1/messages"), 405)


def test_failures_are_in_anthropics_form(server):
    url, _, _ = server
    refused(ask(url, messages=[{"role": "user", "content": "busy"}]), 529, "overloaded_error")
    failing = [{"role": "user", "content": "fail"}]
    refused(ask(url, messages=failing), 500, "api_error")
    fields = {"model": "tiny", "max_tokens": 99, "messages": failing}
    with (
        pytest.raises(anthropic.APIStatusError) as caught,
        client_of(url).messages.stream(**fields) as stream,
    ):
        list(stream)
    assert caught.value.body["error"]["type"] == "api_error" and caught.value.body["request_id"]


def test_a_silent_stream_pings_and_a_client_that_leaves_cancels():
    with scripted(alive_s=0.05) as (url, backend, _):
        fields = {"model": "tiny", "max_tokens": 99, "messages": [{"role": "user", "content": "slow"}]}
        with httpx.stream("POST", f"{url}/v1/messages", json={**fields, "stream": True}) as response:
            lines = response.iter_lines()
            assert next(line for line in lines if "ping" in line) == "event: ping"
            assert backend.open
        until(lambda: backend.cancelled and not backend.open)
