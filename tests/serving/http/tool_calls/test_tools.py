"""Tool calls over HTTP: with the official client against a scripted model, and with a real one."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
import httpx

from attar.serving.http.answer import AnswerForm
from attar.serving.http.app import create_app
from attar.serving.http.conversation import ChatMessage
from attar.serving.http.settings import ServerSettings
from attar.serving.http.tokenizer import ChatOptions, ServerTokenizer
from tests import tiny_models
from tests.serving.http.fake import FakeBackend, FakeTokenizer
from tests.serving.http.real import refused, serving
from tests.serving.http.test_live import running_app

HERMES = "<tool_call> tools </think>"  # the words of a template
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 8}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
TWO = (
    "<think>Two calls.</think>\nOne moment.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now"}\n</tool_call>'
)
MESSAGES = [{"role": "user", "content": "The weather?"}]


@contextmanager
def scripted(answer, template=HERMES):
    """A server whose model answers with a text."""
    backend, settings = FakeBackend(context=4000, answer=answer), ServerSettings(port=0)
    tokenizer = FakeTokenizer(template)
    app = create_app(backend, settings, tokenizer=tokenizer, model="tiny")
    with running_app(app, settings) as (url, _):
        yield url, backend, tokenizer


def client_of(url):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def ask(url, **body):
    body = {"model": "tiny", "messages": MESSAGES, **body}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)


def test_the_official_client_gets_calls():
    with scripted(TWO) as (url, backend, tokenizer):
        answer = client_of(url).chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "One moment."
    assert choice.message.reasoning_content == choice.message.reasoning == "Two calls."
    calls = choice.message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("get_weather", {"city": "Paris"}),
        ("now", {}),
    ]
    assert len({call.id for call in calls}) == 2 and all(call.id.startswith("call_") for call in calls)
    assert [tool["function"]["name"] for tool in tokenizer.options.tools] == ["get_weather", "now"]
    assert backend.asked[0][1].grammar is None


def test_the_official_client_streams_calls():
    with scripted(TWO) as (url, _, _):
        client = client_of(url)
        whole = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS).choices[0]
        chunks = list(
            client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS, stream=True)
        )
        with client.chat.completions.stream(model="tiny", messages=MESSAGES, tools=TOOLS) as stream:
            final = stream.get_final_completion().choices[0]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == whole.message.content
    assert "".join(getattr(delta, "reasoning_content", "") or "" for delta in deltas) == "Two calls."
    pieces = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [piece.index for piece in pieces if piece.id] == [0, 1]
    arguments = ["", ""]
    for piece in pieces:
        arguments[piece.index] += piece.function.arguments
    assert arguments == [call.function.arguments for call in whole.message.tool_calls]
    assert sum(piece.index == 0 for piece in pieces) > 10, "arguments come while they are written"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert [call.function.name for call in final.message.tool_calls] == ["get_weather", "now"]


def test_one_call_where_no_more_are_wanted():
    with scripted(TWO) as (url, _, _):
        answer = ask(url, tools=TOOLS, parallel_tool_calls=False).json()
    assert [call["function"]["name"] for call in answer["choices"][0]["message"]["tool_calls"]] == [
        "get_weather"
    ]


def test_without_tools_an_answer_is_text():
    with scripted(TWO.partition("</think>\n")[2]) as (url, _, tokenizer):
        for body in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
            message = ask(url, **body).json()["choices"][0]["message"]
            assert message["content"].startswith("One moment.\n<tool_call>") and "tool_calls" not in message
            assert not tokenizer.options.tools


def test_choices_become_grammars():
    with scripted(TWO) as (url, backend, _):
        named = {"type": "function", "function": {"name": "now"}}
        done = ask(url, tools=TOOLS, tool_choice=named, messages=MESSAGES).json()["choices"][0]
        assert done["finish_reason"] == "stop", "as at OpenAI, where the call is named"
        ask(url, tools=TOOLS, tool_choice="required").raise_for_status()
        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
        ask(url, tools=TOOLS, response_format=schema).raise_for_status()
        grammars = [params.grammar for _, params, _ in backend.asked]
        assert "get_weather" not in grammars[0] and "now" in grammars[0]
        assert "get_weather" in grammars[1] and "answer" not in grammars[1]
        assert "start: calls | answer" in grammars[2] and backend.asked[2][1].json_schema is None


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": TOOLS[:1] * 2}, "tools"),
        ({"tools": TOOLS[:1] * 129}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"functions": [{"name": "f"}]}, "functions"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}
                ],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_wrong_tools_are_refused_by_name(body, param):
    with serving() as (url, _, _):
        refused(ask(url, **body), 400, param=param)


def test_a_real_model_is_held_to_the_call():
    """attar:tiny has never seen a tool; its template knows none, so they are in the system message."""
    with serving() as (url, _, _):
        for stream in (False, True):
            body = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": 3}
            if stream:
                client = client_of(url)
                with client.chat.completions.stream(
                    model="tiny", messages=MESSAGES, max_completion_tokens=200, **body
                ) as events:
                    message = events.get_final_completion().choices[0].message.model_dump()
            else:
                message = ask(url, max_tokens=200, **body).json()["choices"][0]["message"]
            [call] = message["tool_calls"]
            assert call["function"]["name"] in ("get_weather", "now"), message
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
            assert not message["content"]


CHANNELS = (
    "<|channel|>analysis<|message|>A call.<|end|><|start|>assistant"
    "<|channel|>commentary to=functions.get_weather "
    '<|constrain|>json<|message|>{"city": "Paris"}<|call|>'
)


def test_channels_are_read_with_tools_and_without():
    with scripted(CHANNELS, "tools <|channel|>") as (url, _, _):
        client = client_of(url)
        message = (
            client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS).choices[0].message
        )
        with client.chat.completions.stream(model="tiny", messages=MESSAGES, tools=TOOLS) as stream:
            streamed = stream.get_final_completion().choices[0].message
        items = client.responses.create(
            model="tiny", input="hi", tools=[TOOLS[0]["function"] | {"type": "function"}]
        )
    for one in (message, streamed):
        assert one.reasoning_content == "A call." and not one.content
        [call] = one.tool_calls
        assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')
    assert [item.type for item in items.output] == ["reasoning", "function_call"]
    assert items.usage.output_tokens_details.reasoning_tokens > 3
    with scripted("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
                  "<|channel|>") as (url, _, _):  # fmt: skip
        message = ask(url).json()["choices"][0]["message"]
    assert message["content"] == "Yes." and message["reasoning"] == "Hm."


def test_channels_need_their_marks():
    form, token_of = AnswerForm.of("<|channel|>"), {"<|channel|>": 7}.get
    assert form.constraints(None, token_of, None) == {"skip_special_tokens": False}
    assert AnswerForm.of(HERMES).constraints(None, {"<tool_call>": 7}.get, None) == {}


def test_reasoning_before_a_call_goes_back_under_the_name_of_each_template():
    call = {"function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "reasoning": "Hm.", "tool_calls": [call]}
    assert ChatMessage(**message).plain()["thinking"] == "Hm."
    assert "thinking" not in ChatMessage(**message, content="Text.").plain()
    assert "thinking" not in ChatMessage(role="assistant", reasoning="Hm.").plain()


SHOWS = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} "
    "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}{% endfor %};{% endfor %}"
)


def rendered(template, messages, tools=()):
    tokenizer = tiny_models.tokenizer()
    tokenizer.chat_template = template
    served = ServerTokenizer(tokenizer)
    return served.decode(served.chat(messages, ChatOptions(tools)))


def test_a_template_that_knows_tools_gets_them():
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rom"}}}
    messages = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = rendered(SHOWS, messages, TOOLS)
    assert text.startswith('{"type": "function", "function": {"name": "get_weather"')
    assert text.endswith("assistant:get_weather city=Rom;")


def test_a_template_without_tools_is_told_in_words():
    plain = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    call = {"type": "function", "function": {"name": "now", "arguments": {}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "12:00", "tool_call_id": "a", "name": "now"},
    ]
    text = rendered(plain, messages, TOOLS)
    assert text.startswith("system:Be brief.\n\nYou can call these tools:") and '"get_weather"' in text
    assert 'assistant:[{"name": "now", "arguments": {}}]\nuser:Result of now: 12:00\n' in text
    assert rendered(plain, MESSAGES, TOOLS).startswith("system:You can call")
    assert rendered(plain, MESSAGES) == "user:The weather?\n"


def test_special_tokens_in_a_tool_are_text():
    tool = [{"type": "function", "function": {"name": "f", "description": "<|endoftext|>"}}]
    tokenizer = tiny_models.tokenizer()
    tokenizer.chat_template = SHOWS
    served = ServerTokenizer(tokenizer)
    ids = served.chat(MESSAGES, ChatOptions(tool))
    assert tokenizer.eos_token_id not in ids and "<|endoftext|>" in served.decode(ids)
    assert served.special_token("<|endoftext|>") == tokenizer.eos_token_id


THINKS = [{"role": "user", "content": "Capital? <think>"}]  # the scripted tokenizer ends the prompt with it
GUIDES = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
    "object": {"response_format": {"type": "json_object"}},
    "regex": {"regex": "[a-z]+"},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "format and tools": {"response_format": {"type": "json_object"}, "tools": TOOLS},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("template", [HERMES, "<|channel|> tools"])
def test_an_answer_that_a_grammar_holds_is_no_reasoning(template):
    """Where the prompt has begun the reasoning it ends at once; without a grammar the answer goes on."""
    with scripted("yes", template) as (url, backend, _):
        for name, fields in GUIDES.items():
            for stream in (False, True):
                ask(url, messages=THINKS, stream=stream, **fields).raise_for_status()
            message = ask(url, messages=THINKS, **fields).json()["choices"][0]["message"]
            assert message["content"] == "yes" and "reasoning" not in message, name
        prompt = bytes(token for token in backend.asked[0][0] if token < 256)
        assert prompt.endswith(b"<think>\n\n</think>\n\n") == (template == HERMES)
        text = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
        body = {"model": "tiny", "input": THINKS, "text": text}
        output = httpx.post(f"{url}/v1/responses", json=body).json()["output"]
        assert [item["type"] for item in output] == ["message"]
        if template == HERMES:
            message = ask(url, messages=THINKS).json()["choices"][0]["message"]
            assert message["reasoning"] == "yes" and not message["content"]


def test_reasoning_ends_at_once_where_none_is_wanted():
    """In all APIs; a template without tags gets the variables alone."""
    bodies = {
        "/v1/chat/completions": {"messages": THINKS, "reasoning_effort": "none"},
        "/v1/responses": {"input": THINKS, "reasoning": {"effort": "none"}},
        "/v1/messages": {"messages": THINKS, "thinking": {"type": "disabled"}, "max_tokens": 9},
    }
    with scripted("yes") as (url, backend, tokenizer):
        for path, body in bodies.items():
            text = httpx.post(url + path, json={"model": "tiny", **body}).text
            assert "yes" in text and not re.search('"(thinking|reasoning_content)":', text), path
            prompt = bytes(token for token in backend.asked[-1][0] if token < 256)
            assert prompt.endswith(b"<think>\n\n</think>\n\n"), path
            assert tokenizer.options.variables["enable_thinking"] is False, path


def test_a_forced_answer_that_is_cut_has_no_markup_in_its_text():
    """Neither inside its first call nor inside its second."""
    cut = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>\n{"na'
    for answer, calls in ((cut, ["now"]), (cut[:20], [])):
        with scripted(answer) as (url, _, _):
            for stream in (False, True):
                response = ask(url, tools=TOOLS, tool_choice="required", stream=stream)
                assert "<tool_call>" not in response.text and 'na"' not in response.text
            message = ask(url, tools=TOOLS, tool_choice="required").json()["choices"][0]["message"]
            assert not message["content"] and "<tool_call>" not in json.dumps(message)
            assert [call["function"]["name"] for call in message.get("tool_calls") or ()] == calls
            assert "<tool_call>" in ask(url, tools=TOOLS).json()["choices"][0]["message"]["content"]


def test_some_of_the_tools_are_allowed():
    """OpenAI's allowed_tools: all are shown, some may be called, or must."""
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    with scripted(TWO) as (url, backend, tokenizer):
        for mode in ("required", "auto"):
            choice = {"type": "allowed_tools", "allowed_tools": allowed | {"mode": mode}}
            ask(url, tools=TOOLS, tool_choice=choice).raise_for_status()
            assert [tool["function"]["name"] for tool in tokenizer.options.tools] == ["get_weather", "now"]
        grammar = backend.asked[0][1].grammar
        assert "now" in grammar and "get_weather" not in grammar and backend.asked[1][1].grammar is None
        unknown = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "x"}}]}
        choice = {"type": "allowed_tools", "allowed_tools": unknown}
        refused(ask(url, tools=TOOLS, tool_choice=choice), 400, param="tool_choice")
        flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
        choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}
        body = {"model": "tiny", "input": "hi", "tools": flat, "tool_choice": choice}
        answer = httpx.post(f"{url}/v1/responses", json=body).json()
        assert answer["tool_choice"] == choice and backend.asked[2][1].grammar == grammar
