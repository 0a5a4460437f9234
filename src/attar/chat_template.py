"""Chat templates as transformers renders them, without transformers.

A template is a program that comes with a model, so it runs in Jinja's immutable sandbox, in a process with
bounds of time and memory (:mod:`attar.limited_process`), and sees plain JSON values alone. Besides Jinja's
own functions it has those of transformers (5.23, ``utils/chat_template_utils.py``): ``raise_exception``,
``strftime_now``, ``tojson`` that escapes no HTML, ``break`` and ``continue`` in loops, ``dict`` and
``namespace`` without a way to attributes of Python, and ``{% generation %}`` blocks, which are rendered as
what they hold.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from secrets import token_hex
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from attar.limited_process import CostError, LimitedProcess, RequestError

SECONDS, MEMORY = 2.0, 1 << 30  # of the processor, bytes; for one conversation
MOST_CHARACTERS = 1 << 24  # of its text
MAX_LEVELS = 128  # of what a template reads
PLAIN = (
    "{% for message in messages %}"
    "{% if not loop.first and message.role != 'assistant' %}{{ '\\n' }}{% endif %}{{ message.content }}"
    "{% endfor %}"
)
"""For a model that only continues text: the messages' texts, each of a user on a line of its own. An answer
stands where it was written, so a second one continues what the first read."""
PLAIN_NOTE = "the model continues the messages' text; it has no chat template"

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names under which messages bring it


class TemplateCostError(jinja2.TemplateError):
    """The template needs too much time or memory."""


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    keep_none: bool = False,
    **variables: Any,
) -> str:
    """The text of a conversation.

    Args:
        messages: with a role and mostly a content. Fields that are None are left out.
        add_generation_prompt: end with what begins the assistant's answer.
        keep_none: fields that are None are None in the template, which may compare them.
        variables: others that the template may read: the special tokens by name.

    Raises:
        ValueError: there are no messages, or a value is nested too deeply.
        jinja2.TemplateError: the template is damaged, or refuses the messages.
        TemplateCostError: a subclass; it needs too much time or memory.
    """
    if not messages:
        raise ValueError("a conversation needs at least one message")
    chat = [{k: v for k, v in message.items() if keep_none or v is not None} for message in messages]
    request = {
        "template": template,
        "messages": [_with_reasoning(_plain(message)) for message in chat],
        "tools": _plain(tools),
        "add_generation_prompt": add_generation_prompt,
        "variables": {name: _plain(value) for name, value in variables.items()},
    }
    return str(_in_process(request))


def render_with(
    tokenizer: Any,
    conversation: Sequence[Mapping[str, Any]],
    template: str | Mapping[str, str] | None,
    **settings: Any,
) -> str:
    """The text of a conversation, with a tokenizer's special tokens.

    Args:
        template: one, or several by name.
        settings: those of ``render_chat``.

    Raises:
        ValueError: there is no template; and as ``render_chat``.
    """
    if isinstance(template, Mapping):
        tools = settings.get("tools") is not None and "tool_use" in template
        template = template.get("tool_use" if tools else "default")
    if not template:
        raise ValueError("the tokenizer has no chat template that is the default")
    return render_chat(template, conversation, **{**tokenizer.special_tokens_map, **settings})


def apply_template(tokenizer: Any, conversation: Sequence[Mapping[str, Any]], **settings: Any) -> str:
    """The text of a conversation in the template of any tokenizer; one of transformers renders it here too,
    within bounds.

    Args:
        settings: those of ``render_chat``; ``chat_template``: in place of the tokenizer's own.

    Raises:
        as ``render_with``.
    """
    method = getattr(type(tokenizer), "apply_chat_template", None)
    if getattr(method, "__module__", "") != "transformers.tokenization_utils_base":
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, **settings))
    settings = {"keep_none": True, **settings}  # as transformers does
    template = settings.pop("chat_template", None) or tokenizer.chat_template
    return render_with(tokenizer, conversation, template, **settings)


def apply_continued(tokenizer: Any, conversation: Sequence[Mapping[str, Any]], **settings: Any) -> str:
    """The text of a conversation up to the end of its last message, which goes on, as transformers'
    ``continue_final_message`` gives it: a template that strips messages strips this one, too.

    Raises:
        ValueError: the template does not write the last message; and as ``render_with``.
    """
    *before, last = conversation
    end = token_hex(16)
    marked = {**last, "content": f"{last['content']}{end} "}
    text, marker, after = apply_template(tokenizer, [*before, marked], **settings).rpartition(end)
    if not marker:
        raise ValueError("the chat template does not write the last message, so it cannot go on")
    return text if after.startswith(" ") else text.rstrip()


def check_template(template: str) -> None:
    """Raise jinja2.TemplateSyntaxError, with the line, for a text that is no template."""
    _in_process({"template": template})


def _in_process(request: dict[str, Any]) -> Any:
    """The result of ``answer`` in a separate process.

    Raises:
        jinja2.TemplateError: of the class that the template raised, where it is jinja's.
        TemplateCostError: the template needs too much time or memory.
    """
    try:
        return _process(os.getpid())(request)
    except CostError as error:
        raise TemplateCostError(str(error)) from None
    except RequestError as error:
        if error.kind == "OverflowError":
            raise TemplateCostError(str(error)) from None
        kind: Any = getattr(jinja2.exceptions, error.kind, jinja2.TemplateError)
        if issubclass(kind, jinja2.TemplateSyntaxError):
            raise kind(str(error), error.line or 1) from None
        raise kind(str(error)) from None


@lru_cache(maxsize=1)
def _process(pid: int) -> LimitedProcess:
    """Of this process; one that was forked has another."""
    return LimitedProcess(f"{__name__}:answer", SECONDS, MEMORY)


def answer(request: dict[str, Any]) -> str:
    """Render a conversation in this process, without bounds but the bound of the text's length.

    Args:
        asked: the arguments of ``render_chat`` in JSON; without messages the template is compiled alone.
    """
    template = _compiled(request["template"])
    if "messages" not in request:
        return ""
    text = template.render(
        messages=request["messages"],
        tools=request["tools"],
        documents=None,
        add_generation_prompt=request["add_generation_prompt"],
        **request["variables"],
    )
    if len(text) > MOST_CHARACTERS:
        raise MemoryError
    return text


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning under the names that templates read."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return (
        message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
    )


def _plain(value: Any, levels: int = MAX_LEVELS) -> Any:
    """JSON values: a template gets no object whose methods the sandbox does not know."""
    if levels < 0:
        raise ValueError(f"a value is nested more than {MAX_LEVELS} levels deep")
    if value is None or type(value) in (bool, str, int, float):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # an enumeration's value, say, without its methods
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key, levels - 1): _plain(item, levels - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item, levels - 1) for item in value)
    return f"<{type(value).__name__}>"


class _Generation(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}``, with which training marks the assistant's part."""

    tags = frozenset(("generation",))  # type: ignore[assignment]

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_content")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _content(self, caller: Any) -> str:
        return str(caller())


class _Dict:
    """``dict`` without its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """``namespace`` that takes no names of Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `namespace(self=...)` works, as in Jinja
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template cannot set {name!r} in a namespace")


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
    )
    return environment.from_string(template)
