"""Conversations reach the prompt whole, whatever form of messages a chat template reads."""

from __future__ import annotations

import json

import pytest

from attar.errors import DataError
from attar.serving.http.conversation import ChatMessage
from attar.serving.http.message_form import MOST_MESSAGES, MessageForm, find_form, read_arguments, shape_of
from attar.serving.http.tokenizer import ChatOptions, ServerTokenizer
from tests import tiny_models

START = "{% for t in tools or [] %}{{ t | tojson }};{% endfor %}{% for m in messages %}"
END = "{% endfor %}"
TEXT = "{{ m.role }}:{{ m.content }};"
CALLS = "{% for c in m.tool_calls or [] %}"
OBJECT = CALLS + "{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
JOINED = "{% for c in m['tool_calls'] %}{{ c['function']['name'] + c['function']['arguments'] }}{% endfor %}"
ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles alternate') }}{% endif %}{% endfor %}"
)
NO_SYSTEM = "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
TEMPLATES = {  # the template, and what differs from OpenAI's form for the conversation below
    "objects": (START + TEXT + OBJECT + END, {}),
    "iterated": (
        START + TEXT + CALLS + "{{ c.function.name }}{% for k, v in c.function.arguments | items %}"
        "<{{ k }}>{{ v }}{% endfor %}{% endfor %}" + END,
        {},
    ),
    "joined": (
        START + TEXT + "{% if 'tool_calls' in m %}" + JOINED + "{% endif %}" + END,
        {"arguments": "text"},
    ),
    "printed": (
        START + TEXT + CALLS + "{{ c.function.name }}{{ c.function.arguments }}{% endfor %}" + END,
        {"arguments": "text"},
    ),
    "flat": (
        START + TEXT + CALLS + "{{ c.name ~ c.arguments | tojson }}{% endfor %}" + END,
        {"calls": "flat"},
    ),
    "none": (
        START + "{% if m.content is none %}" + JOINED + "{% else %}" + TEXT + "{% endif %}" + END,
        {"arguments": "text", "empty": None, "apart": True},
    ),
    "one call": (
        START + TEXT + "{% if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one') }}{% endif %}"
        + OBJECT + END,
        {"apart": True},
    ),
    "ipython": (
        START + "{% if m.role in ('system', 'user', 'assistant', 'ipython') %}" + TEXT + OBJECT
        + "{% endif %}" + END,
        {"results": "ipython"},
    ),
    "parts": (
        START + "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %};"
        + OBJECT + END,
        {"content": "parts"},
    ),
    "short ids": (
        START + TEXT + CALLS + "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
        + "{% endfor %}" + OBJECT + END,
        {"ids": "short"},
    ),
    "ids with names": (
        START + TEXT + CALLS + "{{ c.id }}{{ c.function.arguments | tojson }}{% endfor %}" + END,
        {"ids": "named"},
    ),
    "calls without tools": (START.replace("tools", "toolsets") + TEXT + OBJECT + END, {"tools": "words"}),
    "tools alone": (START + TEXT + END, {"calls": "words"}),
    "no system": (START + NO_SYSTEM + TEXT + OBJECT + END, {"system": "user"}),
    "first system": (
        START + "{% if not loop.first %}" + NO_SYSTEM + "{% endif %}" + TEXT + OBJECT + END,
        {"system": "first"},
    ),
    "the last system at the head": (
        "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.system = m.content %}{% endif %}{% endfor %}{{ ns.system }}{% for m in messages %}"
        "{% if m.role != 'system' %}" + TEXT + OBJECT + "{% endif %}" + END,
        {"system": "first", "tools": "words"},
    ),
    "no tools, no system, alternating": (
        ALTERNATE + "{% for m in messages %}" + NO_SYSTEM + TEXT + END,
        {"calls": "words", "results": "user", "tools": "words", "system": "user", "merged": True},
    ),
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"where": {}}}}}


def call(id, arguments):
    return {"id": id, "type": "function", "function": {"name": f"call_{id}", "arguments": arguments}}


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "user", "content": "Two?"},
    {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [call("a", '{"n": 12345678901234567890}'), call("b", '{"text": "Zeile\\n"}')],
    },
    {"role": "tool", "tool_call_id": "a", "content": "result one"},
    {"role": "tool", "tool_call_id": "b", "content": "result two"},
    {"role": "developer", "content": "Be exact."},
    {"role": "user", "content": "Three?"},
]
PARTS = (
    "Be brief.",
    "One?",
    "Two?",
    "Let me see.",
    "call_a",
    "call_b",
    "12345678901234567890",
    "Zeile",
    "look",
    "where",
)
PARTS += ("result one", "result two", "Be exact.", "Three?")


def served(template):
    tokenizer = tiny_models.tokenizer()
    tokenizer.chat_template = template
    return ServerTokenizer(tokenizer)


def prompt(template, messages, tools=(TOOL,)):
    tokenizer = served(template)
    messages = [ChatMessage.model_validate(message).plain() for message in messages]
    return tokenizer.decode(tokenizer.chat(messages, ChatOptions(tools)))


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_part_of_a_conversation_is_in_the_prompt_once(name):
    template, changes = TEMPLATES[name]
    text = prompt(template, CONVERSATION)
    text = text.replace("Result of call_a", "").replace("Result of call_b", "")
    assert {part: text.count(part) for part in PARTS} == dict.fromkeys(PARTS, 1), text
    assert "None" not in text and "'n':" not in text and '\\"n\\"' not in text, text
    tokenizer = served(template)
    plain = [ChatMessage.model_validate(message).plain() for message in CONVERSATION]
    form = tokenizer._form(plain, ChatOptions((TOOL,)))
    assert form == MessageForm(**changes), form


def test_tools_in_words_beside_a_system_message_that_comes_later():
    template = TEMPLATES["the last system at the head"][0]
    text = prompt(template, [CONVERSATION[1], {"role": "assistant", "content": "Yes."}, *CONVERSATION[6:]])
    assert all(part in text for part in ("look", "One?", "Yes.", "Be exact.", "Three?"))


def test_a_template_that_joins_arguments_gets_them_as_the_client_wrote_them():
    template = TEMPLATES["joined"][0]
    assert 'look{"a":1.0,  "b":"\\u00e9"}' in prompt(
        template,
        [CONVERSATION[1], {"role": "assistant", "tool_calls": [
            {"type": "function", "function": {"name": "look", "arguments": '{"a":1.0,  "b":"\\u00e9"}'}}
        ]}],
    )  # fmt: skip


def test_arguments_that_are_no_json_do_not_end_the_conversation():
    """Line breaks inside of strings are read; what is cut is a text."""
    assert read_arguments('{"a": "x\ny\t"}') == {"a": "x\ny\t"}
    assert read_arguments("") == {} and read_arguments("[1]") == {"arguments": [1]}
    assert read_arguments("[" * 100_000) == {"arguments": "[" * 100_000}
    for written in ('{"content": "line1\nli', '{"content": "line1\nline2"}', "null", "[" * 3000):
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "tool_calls": [call("a", written)]},
            {"role": "tool", "tool_call_id": "a", "content": "no JSON"},
        ]
        for name in ("objects", "iterated", "joined", "no tools, no system, alternating"):
            assert "no JSON" in prompt(TEMPLATES[name][0], messages), name


def test_what_a_template_loses_in_every_form_is_named():
    last = "{{ tools | tojson }}{{ messages[-1].content }}"
    assert prompt(last, CONVERSATION[1:2]).endswith("One?")
    with pytest.raises(DataError, match="leaves out a user's message, an answer of this conversation"):
        prompt(last, [CONVERSATION[1], {"role": "assistant", "content": "Yes."}, CONVERSATION[1]], ())
    with pytest.raises(DataError, match="refuses the messages: never"):
        prompt("{{ raise_exception('never') }}", CONVERSATION)


def test_the_legacy_form_of_a_call():
    messages = [
        CONVERSATION[1],
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "look", "arguments": '{"where": "up"}'},
        },
        {"role": "function", "name": "look", "content": "a bird"},
    ]
    assert (
        prompt(TEMPLATES["objects"][0], messages, ())
        == 'user:One?;assistant:;look({"where": "up"})tool:a bird;'
    )


def test_a_shape_and_its_search_are_bounded():
    """A long conversation has as many kinds as a short one; a template that refuses all is soon given up."""
    turn = [*CONVERSATION[1:6]]
    long = [dict(message) for _ in range(400) for message in turn]
    assert len(shape_of(long)) <= 16 * 8 * 6 and shape_of(long) == shape_of(long + turn)
    rendered = []

    def render(messages, tools):
        rendered.append(len(messages))
        raise ValueError

    assert find_form(render, shape_of(long), True, MessageForm()) == MessageForm()
    assert sum(rendered) <= 8 * MOST_MESSAGES
    tokenizer = served(TEMPLATES["objects"][0])
    for _ in range(3):
        tokenizer.chat(CONVERSATION[:2])
    assert len(tokenizer._forms) == 1
    tokenizer.chat(CONVERSATION[:2], ChatOptions(variables={"x": "y" * 100_000}))
    assert len(tokenizer._forms) == 2 and len(str(list(tokenizer._forms))) < 10_000


def test_results_get_the_name_of_their_call():
    template = START + "{% if m.role == 'tool' %}{{ m.name }}={% endif %}" + TEXT + OBJECT + END
    assert "call_b=tool:result two" in prompt(template, CONVERSATION)
    assert json.dumps(TOOL) in prompt(template, CONVERSATION)
