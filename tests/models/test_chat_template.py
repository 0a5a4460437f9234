"""Chat templates: rendered as transformers renders them, and as safely."""

import jinja2
import pytest

from attar.models.chat_template import render_chat
from tests.tiny_models import tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = """\
{%- if tools %}
    {{- "# Tools\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- "\\n" ~ (tool.function | tojson(indent=2, sort_keys=true)) }}
    {%- endfor %}
{%- endif %}
{%- set ns = namespace(last=-1, name='') %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.role == 'stop' %}{% break %}{% endif %}
    {%- set ns.last = loop.index0 %}
    {%- if message.content is defined and message.content is string %}
        {{- bos_token ~ message.role ~ ': ' ~ message.content | trim }}
    {%- elif message.content is defined %}
        {%- for part in message.content %}{{ part.text | upper }}{% endfor %}
    {%- endif %}
    {%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}
    {% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{%- endfor %}
{{ ns.last }} {{ dict(a=1, b='é<&>') | tojson }} {{ dict.fromkeys(['x'], 2) }}
{%- generation %}marked{% endgeneration %}
{%- if add_generation_prompt %} go{% endif %}
"""
MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}
{%- set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{{- bos_token }}
{%- for m in rest %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}
{%- if m['role'] == 'user' %}[INST] {{ system ~ '\\n\\n' if system is defined and loop.last }}
{{- m['content'] }} [/INST]
{%- else %}{{ ' ' ~ m['content'] ~ eos_token }}{% endif %}
{%- endfor %}"""
DATED = "{{ strftime_now('%d %b %Y') }} {{ messages | length }}"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "wie's <Wetter> wird",
        "parameters": {"z": 1, "a": [None]},
    },
}
CONVERSATIONS = [
    [{"role": "user", "content": "Hi  "}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Schöne Grüße <b>&</b>"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "again"},
    ],
]
RICH = [
    {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "text", "text": "here"}]},
    {"role": "skip", "content": "never"},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "weather", "arguments": {"at": 1.5}}]},
    {"role": "assistant", "content": "so", "reasoning": "because"},
    {"role": "stop", "content": "x"},
    {"role": "user", "content": "not shown"},
]
ROLES = {
    "bos_token": "<|endoftext|>",
    "eos_token": "<|endoftext|>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}


@pytest.mark.parametrize("template", [CHATML, TOOLS, MISTRAL, DATED])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [WEATHER]])
def test_templates_render_as_in_transformers(template, prompt, tools):
    reference = tokenizer()
    reference.chat_template = template
    chats = [*CONVERSATIONS, RICH] if template is TOOLS else CONVERSATIONS
    for messages in chats:
        settings = {"tools": tools, "add_generation_prompt": prompt}
        expected = reference.apply_chat_template(messages, tokenize=False, **settings)
        assert render_chat(template, messages, **settings, **ROLES) == expected


def test_a_template_refuses_in_its_own_words():
    with pytest.raises(jinja2.TemplateError, match="roles must alternate"):
        render_chat(MISTRAL, [{"role": "assistant", "content": "first"}], **ROLES)


def test_no_messages_are_no_conversation():
    with pytest.raises(ValueError, match="at least one message"):
        render_chat(CHATML, [])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_a_template_reaches_nothing_of_python(template):
    with pytest.raises((jinja2.exceptions.SecurityError, jinja2.exceptions.UndefinedError, OverflowError)):
        render_chat(template, CONVERSATIONS[0])


def test_a_template_sees_values_and_no_objects():
    class Odd:
        text = "secret"

    class Name(str):
        def __str__(self):
            return "changed"

    template = "{{ messages[0].content }} {{ messages[0].name }} {{ messages[0].content.text }}"
    assert render_chat(template, [{"role": "user", "content": Odd(), "name": Name("n")}]) == "<Odd> n "
