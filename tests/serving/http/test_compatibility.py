"""What users of other servers send: options of templates and prompts, defaults of a model, ignored fields."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
import httpx

from attar.chat_template import PLAIN, render_chat
from attar.errors import DataError
from attar.serving.http.app import create_app
from attar.serving.http.model_defaults import read_template, sampling_defaults
from attar.serving.http.settings import ServerSettings
from attar.serving.http.tokenizer import ChatOptions, ServerTokenizer
from attar.version import __version__
from tests import tiny_models
from tests.serving.http.fake import FakeBackend, FakeTokenizer
from tests.serving.http.real import CHAT, COMPLETIONS, body, refused, serving
from tests.serving.http.test_live import running, running_app

MESSAGES = [{"role": "user", "content": "hi"}]
PATHS = {"/v1/chat/completions": {"messages": MESSAGES}, "/v1/completions": {"prompt": "hi"}}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ '<think>' if enable_thinking }}{% endif %}{{ extra }}"
)


def rendered(messages, **options):
    tokenizer = tiny_models.tokenizer()
    tokenizer.chat_template = TEMPLATE
    served = ServerTokenizer(tokenizer)
    return served.decode(served.chat(messages, ChatOptions(**options)))


def test_a_last_message_goes_on():
    talk = [*MESSAGES, {"role": "assistant", "content": " Hello,  "}]
    assert rendered(talk) == "<user>hi</s><assistant>Hello,</s><assistant>"
    assert rendered(talk, continued=True) == "<user>hi</s><assistant>Hello,  "
    assert rendered(talk, answer_begins=False) == "<user>hi</s><assistant>Hello,</s>"


def test_variables_reach_the_template_as_text():
    assert rendered(MESSAGES, variables={"enable_thinking": True}).endswith("<assistant><think>")
    tokenizer = tiny_models.tokenizer()
    tokenizer.chat_template = TEMPLATE
    served = ServerTokenizer(tokenizer)
    ids = served.chat(MESSAGES, ChatOptions(variables={"extra": "<|endoftext|>"}))
    assert tokenizer.eos_token_id not in ids and served.decode(ids).endswith("<|endoftext|>")


def test_options_of_the_template_over_http():
    with running() as (url, _, server):
        service = server.config.app.state.service
        path = f"{url}/v1/chat/completions"
        asked = {"model": "tiny", "messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}
        httpx.post(path, json=asked).raise_for_status()
        assert service.tokenizer.options.variables == {"enable_thinking": False}
        talk = [*MESSAGES, {"role": "assistant", "content": "Hel"}]
        asked = {"model": "tiny", "messages": talk, "continue_final_message": True}
        httpx.post(path, json=asked).raise_for_status()
        assert service.tokenizer.options.continued
        asked = {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}]}
        httpx.post(f"{url}/tokenize", json=asked).raise_for_status()
        assert service.tokenizer.options.tools[0]["function"] == {"name": "f"}
        for wrong, param in (
            ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
            ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
            ({"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs"),
            ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
            ({"continue_final_message": True, "messages": [{"role": "user"}]}, "continue_final_message"),
            ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
            ({"structured_outputs": {}}, "structured_outputs"),
            ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ):
            refused(httpx.post(path, json={"model": "tiny", "messages": MESSAGES, **wrong}), 400, None, param)


def test_reasoning_is_left_out_where_it_is_not_wanted():
    backend, settings = FakeBackend(answer="<think>a</think>b"), ServerSettings(port=0)
    app = create_app(backend, settings, tokenizer=FakeTokenizer("</think>"), model="tiny")
    with running_app(app, settings) as (url, _):
        asked = {"model": "tiny", "messages": MESSAGES, "include_reasoning": False}
        message = httpx.post(f"{url}/v1/chat/completions", json=asked).json()["choices"][0]["message"]
        assert message["content"] == "b" and "reasoning" not in message
        text = httpx.post(f"{url}/v1/chat/completions", json=asked | {"stream": True}).text
        assert "reasoning" not in text and '"content":"b"' in text


@pytest.mark.parametrize("path", PATHS)
def test_harmless_fields_are_ignored_and_named(path):
    with running() as (url, backend, _):
        asked = {"model": "tiny", **PATHS[path], "prediction": {"type": "content"}, "user": "me"}
        for stream in (False, True):
            answer = httpx.post(url + path, json={**asked, "stream": stream})
            assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == "user, prediction"
        plain = httpx.post(url + path, json={"model": "tiny", **PATHS[path]})
        assert "x-ignored-fields" not in plain.headers
        answer = httpx.post(url + path, json={**asked, "predicton": 1})
        refused(answer, 400, "unknown_parameter", "predicton")
        assert len(backend.asked) == 3


def test_what_other_services_put_into_messages_is_read_over():
    """Keys of parts and messages that are listed; other kinds of parts are refused in a line."""
    names = ("cache_control", "citations", "provider_options")
    part = {"type": "input_text", "text": "Hi", **{name: {"type": "x"} for name in names}}
    asked = [
        {"role": "user", "content": [part, {"type": "text", "text": "!"}]},
        {
            "role": "assistant",
            "id": "msg_1",
            "content": [{"type": "output_text", "text": "Ho", "annotations": []}],
        },
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "reasoning_details": [{}]},
    ]
    with running() as (url, backend, _):
        path = f"{url}/v1/chat/completions"
        fields = {"function_call": "none", "store": True, "metadata": {"a": "b"}}
        answer = httpx.post(path, json={"model": "tiny", "messages": asked, **fields})
        assert answer.status_code == 200 and "function_call" in answer.headers["x-ignored-fields"]
        prompt = bytes(token for token in backend.asked[0][0] if token < 256).decode()
        assert prompt == "user: Hi!\nassistant: Ho\nassistant: No.\n"
        for kind in ("image_url", "input_audio", "file"):
            messages = [{"role": "user", "content": [{"type": kind, kind: {}}]}]
            answer = httpx.post(path, json={"model": "tiny", "messages": messages})
            refused(answer, 400, None, "messages.0.content.0.type")
            assert f"a part of type '{kind}' cannot be read" in answer.json()["error"]["message"]
        messages = [{"role": "user", "content": [{"type": "text", "text": "a", "colour": 1}]}]
        answer = httpx.post(path, json={"model": "tiny", "messages": messages})
        refused(answer, 400, "unknown_parameter", "messages.0.content.0.colour")


def test_the_tools_of_a_large_client_are_taken():
    """128 tools of some 2 kB: their schemas do not count as values of the body."""
    properties = {f"parameter_{n}": {"type": "string", "description": "A value."} for n in range(30)}
    parameters = {"type": "object", "properties": properties, "required": ["parameter_0"]}
    tools = [
        {"type": "function", "function": {"name": f"tool_{n}", "parameters": parameters}} for n in range(128)
    ]
    backend, settings = FakeBackend(context=100_000), ServerSettings(port=0)
    app = create_app(backend, settings, tokenizer=FakeTokenizer("tools"), model="tiny")
    with running_app(app, settings) as (url, _):
        asked = {"model": "tiny", "messages": MESSAGES, "tools": tools, "tool_choice": "required"}
        assert httpx.post(f"{url}/v1/chat/completions", json=asked).status_code == 200
        many = [{"role": "user", "content": "x", "name": "y"}] * 4000
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked | {"messages": many})
        refused(answer, 400, "too_many_values", None)


def test_the_end_of_a_long_prompt_is_kept():
    with running() as (url, backend, _):
        long = {"model": "tiny", "prompt": "x" * 500 + "abc", "truncate_prompt_tokens": 3}
        assert httpx.post(f"{url}/v1/completions", json=long).json()["usage"]["prompt_tokens"] == 3
        assert bytes(backend.asked[0][0]) == b"abc"
        fits = {**long, "truncate_prompt_tokens": -1, "max_tokens": 20}
        assert httpx.post(f"{url}/v1/completions", json=fits).json()["usage"]["prompt_tokens"] == 80
        ids = {**long, "prompt": [1, 2, 7, 8, 9]}
        httpx.post(f"{url}/v1/completions", json=ids).raise_for_status()
        assert backend.asked[-1][0] == (7, 8, 9)
        talk = [{"role": "user", "content": "y" * 500}]
        chat = {"model": "tiny", "messages": talk, "truncate_prompt_tokens": 5}
        assert httpx.post(f"{url}/v1/chat/completions", json=chat).json()["usage"]["prompt_tokens"] == 5


def test_a_stop_string_is_in_the_text_where_that_is_asked_for():
    with serving() as (url, _, _):

        def text(**more):
            answer = httpx.post(f"{url}/v1/completions", json=body(max_tokens=12, **more), timeout=60)
            return answer.json()["choices"][0]["text"]

        whole = text()
        stop = whole[4:6]
        cut = whole[: whole.index(stop)]
        assert text(stop=stop) == cut
        assert text(stop=stop, include_stop_str_in_output=True) == cut + stop


def test_structured_outputs_of_vllm():
    with serving() as (url, _, _):
        for guide, allowed in (
            ({"choice": ["red", "green"]}, ("red", "green")),
            ({"regex": "[0-9]{2}"}, None),
            ({"json": {"type": "boolean"}}, ("true", "false")),
        ):
            asked = body(max_tokens=12, structured_outputs=guide)
            text = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()["choices"][0]["text"]
            assert text in allowed if allowed else (text.isdigit() and len(text) == 2), text
        twice = body(structured_outputs={"regex": "a"}, regex="b")
        refused(httpx.post(f"{url}/v1/completions", json=twice), 400, None, "structured_outputs")


def test_defaults_of_the_model_apply_where_a_request_has_none(tmp_path):
    stored = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": [1], "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    defaults = sampling_defaults("auto", tmp_path)
    assert defaults == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    assert sampling_defaults("none", tmp_path) == sampling_defaults("auto", tmp_path / "other") == {}
    backend, settings = FakeBackend(), ServerSettings(port=0)
    app = create_app(backend, settings, tokenizer=FakeTokenizer(), model="tiny", defaults=defaults)
    with running_app(app, settings) as (url, _):
        for path, asked in PATHS.items():
            httpx.post(url + path, json={"model": "tiny", "top_p": 0.5, **asked}).raise_for_status()
            params = backend.asked[-1][1]
            assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.5, 20)
    file = tmp_path / "wrong.json"
    file.write_text('{"temperature": -1}')
    with pytest.raises(DataError, match=r"wrong.json: temperature"):
        sampling_defaults(str(file), tmp_path)
    with pytest.raises(DataError, match="no such file"):
        sampling_defaults(str(tmp_path / "absent"), tmp_path)


def test_a_chat_template_of_a_file(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert read_template(str(file)).startswith("{% for")
    file.write_text("{% for m in %}")
    with pytest.raises(DataError, match=r"chat.jinja: line 1"):
        read_template(str(file))
    with pytest.raises(DataError, match="no such file"):
        read_template(str(tmp_path / "absent"))


def test_the_embedded_model_continues_a_conversation():
    parts = [{"type": "text", "text": "def area(width,"}, {"type": "text", "text": " height):"}]
    same = {"model": "tiny", "max_tokens": 12, "temperature": 0}
    with serving(template=None) as (url, _, _):
        for content in ("def add(a, b):", parts):
            text = content if isinstance(content, str) else "".join(part["text"] for part in content)
            messages = [{"role": "user", "content": content}]
            told = httpx.post(url + CHAT, json={**same, "messages": messages})
            continued = httpx.post(url + COMPLETIONS, json={**same, "prompt": text})
            answer = told.json()["choices"][0]["message"]
            assert answer["content"] == continued.json()["choices"][0]["text"] and answer["content"]
        assert httpx.get(f"{url}/attar/state").json()["chat"] is False  # the page lets it continue text


def test_the_plain_template_by_name():
    assert read_template("plain") == PLAIN
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert render_chat(PLAIN, messages, add_generation_prompt=True) == "S\nab\nc"


def test_the_version():
    with running() as (url, _, _):
        assert httpx.get(f"{url}/version").json() == {"version": __version__}
