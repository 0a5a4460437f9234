"""Chat templates: rendered as transformers renders them, and as safely."""

from functools import cache

import jinja2
import pytest

from attar import chat_template
from attar.chat_template import (
    TemplateCostError,
    apply_continued,
    apply_template,
    check_template,
    render_chat,
)
from attar.limited_process import LimitedProcess
from attar.models.loading.tokenizer_rows import TokenizerWithinRows
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
    with pytest.raises(
        (jinja2.exceptions.SecurityError, jinja2.exceptions.UndefinedError, TemplateCostError)
    ):
        render_chat(template, CONVERSATIONS[0])


def test_a_template_sees_values_and_no_objects():
    class Odd:
        text = "secret"

    class Name(str):
        def __str__(self):
            return "changed"

    template = "{{ messages[0].content }} {{ messages[0].name }} {{ messages[0].content.text }}"
    assert render_chat(template, [{"role": "user", "content": Odd(), "name": Name("n")}]) == "<Odd> n "


LOOP, END = "{% for i in range(99999) %}", "{% endfor %}"
GROWING = "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = "
COSTLY = {
    "loops": LOOP * 3 + END * 3,
    "text": LOOP * 2 + "x" * 23 + END * 2,
    "doubling": GROWING + "ns.s + ns.s %}" + END,
    "doubling by ~": GROWING + "ns.s ~ ns.s %}" + END,
    "replace": GROWING + "ns.s|replace('x', 'xx') %}" + END,
    "join": "{{ range(99999) | join('x' * 99999) }}",
    "indent": "{{ 'a\nb' | indent(3000000000) }}",
    "tojson": "{{ [1] | tojson(indent=3000000000) }}",
    "lipsum": "{{ lipsum(3000000) }}",
    "times": "{{ 'a' * 10000000000 }}",
    "list": "{{ [0] * 10000000000 }}",
    "power": "{{ 3 ** 1000000000 }}",
    "percent": "{{ '%3000000000d' % 1 }}",
    "format": "{{ '{:>3000000000}'.format(1) }}",
    "center": "{{ 'a' | center(3000000000) }}",
    "ljust": "{{ 'a'.ljust(3000000000) }}",
    "batch": "{{ [1] | batch(3000000000, 'x') | list }}",
    "slice": "{{ [1] | slice(3000000000) | list }}",
    "length": "{{ 'x' * 20000000 }}",
    "recursion": "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
}


FAST = ("loops", "doubling", "tojson", "power", "length")


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in COSTLY if name not in FAST]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_a_template_has_bounds_of_time_and_memory(name, monkeypatch):
    """Whatever it is that takes so much, in one line; and the next is rendered."""
    monkeypatch.setattr(chat_template, "_process", cache(lambda pid: BRIEF))
    refused = pytest.raises(jinja2.TemplateError, match=r"0.2 s or 1,024 MiB|recursion")
    with refused:
        render_chat(COSTLY[name], CONVERSATIONS[0])
    assert render_chat("{{ messages[0].content }}", CONVERSATIONS[0]) == "Hi  "


BRIEF = LimitedProcess("attar.chat_template:answer", 0.2, 1 << 30)


def test_a_template_is_checked_within_them(monkeypatch):
    """Jinja computes what is constant when it reads a template."""
    monkeypatch.setattr(chat_template, "_process", cache(lambda pid: BRIEF))
    with pytest.raises(TemplateCostError):
        check_template(COSTLY["power"])
    with pytest.raises(jinja2.TemplateSyntaxError) as caught:
        check_template("\n\n{% for %}")
    assert caught.value.lineno == 3


def test_values_nested_without_end_are_refused():
    deep = "x"
    for _ in range(900):
        deep = [deep]
    with pytest.raises(ValueError, match="nested more than 128 levels deep"):
        render_chat(CHATML, CONVERSATIONS[0], x=deep)


def test_tokenizers_of_transformers_have_the_same_bounds(monkeypatch):
    monkeypatch.setattr(chat_template, "_process", cache(lambda pid: BRIEF))
    words = tokenizer()
    words.chat_template = COSTLY["loops"]
    with pytest.raises(TemplateCostError):
        apply_template(words, CONVERSATIONS[0])


STRIPS = "{% for message in messages %}<{{ message.role }}> {{ message.content | trim }}<end>\n{% endfor %}"


@pytest.mark.parametrize("template", [CHATML, STRIPS])
@pytest.mark.parametrize("content", ["As I said", "As I said ", "As I said\n", "said said"])
def test_a_last_message_goes_on_as_in_transformers(template, content):
    words = tokenizer()
    words.chat_template = template
    chat = [{"role": "user", "content": "said?"}, {"role": "assistant", "content": content}]
    expected = words.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert apply_continued(words, chat) == expected


def test_a_template_that_leaves_out_the_last_message_is_refused():
    words = tokenizer()
    words.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ValueError, match="does not write the last message"):
        apply_continued(words, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])


def test_a_tokenizer_with_tokens_beyond_the_rows_has_the_same_bounds(monkeypatch):
    monkeypatch.setattr(chat_template, "_process", cache(lambda pid: BRIEF))
    words = tokenizer()
    words.chat_template = COSTLY["loops"]
    beyond = TokenizerWithinRows(words, {len(words): "<pad>"}, len(words))
    with pytest.raises(TemplateCostError):
        apply_template(beyond, CONVERSATIONS[0])
