"""The form of messages that a chat template reads: some join the arguments of a call as text, others iterate
over them; some refuse a system message, know no results of tools, or want parts instead of a text.

    shape of the conversation  →  a probe with a sentinel in each place  →  rendered in one form after another
                               →  the first form in which every sentinel is in the text, cached

The form differs as little as possible from the plain one, OpenAI's own. A template that loses something
in every form refuses the conversation, and the error names what it loses.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, Literal

from attar.errors import DataError
from attar.serving.http.body_model import MAX_LEVELS, levels_exceed
from attar.serving.http.tool_calls.tool_use import as_words, listed_tools

PlainMessage = dict[str, Any]
Render = Callable[[Sequence[PlainMessage], Sequence[Mapping[str, Any]]], str]
"""A template's text of messages and tools; raises where it refuses them."""
MessageKind = tuple[str, bool, int, bool]
"""Of a message: its role, whether it has text, its number of calls up to 2, whether their ids are short."""

MOST_MESSAGES = 3000  # rendered in each search of a form
_RESULTS = ("tool", "function")
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")  # Mistral's


@dataclass(frozen=True)
class MessageForm:
    """How messages are handed to a template; the defaults are OpenAI's form, with arguments as an object.

    Args:
        system: system messages; only the first, the others at the head of the next user message; all.
        arguments: of calls: an object, or its text in JSON.
        calls: name and arguments are in ``function``, or in the call itself; or calls are text of the answer.
        results: their role; ``user``: words of a user message.
        tools: as OpenAI writes them, only their ``function``, or words of the system message.
        empty: the content of a message that is calls alone.
        content: a text, or a list with one part.
        apart: text and each call have messages of their own, each call with its result behind it.
        ids: of calls: as they are, nine letters and digits, or ``functions.NAME:NUMBER``.
        merged: messages of one role that follow each other are one.
    """

    system: Literal["system", "first", "user"] = "system"
    arguments: Literal["object", "text"] = "object"
    empty: Literal[""] | None = ""
    content: Literal["text", "parts"] = "text"
    results: Literal["tool", "ipython", "observation", "function", "user"] = "tool"
    calls: Literal["nested", "flat", "words"] = "nested"
    apart: bool = False
    ids: Literal["given", "short", "named"] = "given"
    merged: bool = False
    tools: Literal["nested", "flat", "words"] = "nested"

    def apply(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[PlainMessage], list[Mapping[str, Any]]]:
        """Messages and tools for the template."""
        listed = _named(messages, self.ids)
        listed = _apart(listed) if self.apart else listed
        listed = [self._message(message) for message in listed]
        if tools and self.tools == "words":
            listed, tools = _with_system(listed, listed_tools(tools)), ()
        if self.system != "system":
            kept = int(self.system == "first")
            listed = [*listed[:kept], *_system_in_user(listed[kept:])]
        if self.merged:
            listed = _merged(listed)
        if self.content == "parts":
            listed = [_in_parts(message) for message in listed]
        return listed, [tool["function"] for tool in tools] if self.tools == "flat" else list(tools)

    def _message(self, message: PlainMessage) -> PlainMessage:
        if message["role"] in _RESULTS:
            if self.results == "user":
                return as_words(message)
            return {**message, "role": self.results}
        if not message.get("tool_calls"):
            return message
        if self.calls == "words":
            return as_words(message)
        calls = [self._call(call) for call in message["tool_calls"]]
        return message | {"content": message["content"] or self.empty, "tool_calls": calls}

    def _call(self, call: Mapping[str, Any]) -> PlainMessage:
        if "function" not in call:  # of another form already
            return dict(call)
        function = dict(call["function"])
        text, arguments = self.arguments == "text", function.get("arguments")
        if not text:
            function["arguments"] = read_arguments(arguments)
        elif not isinstance(arguments, str):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        if self.calls == "nested":
            return {**call, "function": function}
        return {key: value for key, value in call.items() if key != "function"} | function


_COSTS: dict[str, dict[Any, int]] = {  # how far each value is from the plain form
    "system": {"system": 0, "first": 1, "user": 2},
    "arguments": {"object": 0, "text": 1},
    "empty": {"": 0, None: 1},
    "content": {"text": 0, "parts": 1},
    "results": {"tool": 0, "ipython": 2, "observation": 2, "function": 2, "user": 3},
    "calls": {"nested": 0, "flat": 2, "words": 4},
    "apart": {False: 0, True: 1},
    "ids": {"given": 0, "short": 1, "named": 1},
    "merged": {False: 0, True: 1},
    "tools": {"nested": 0, "flat": 1, "words": 3},
}
_OF_TEXTS, _OF_TOOLS = ("system", "content", "merged"), ("tools", "system")
_OF_CALLS = ("arguments", "empty", "results", "calls", "apart", "ids", "merged")


class CostlyTemplateError(DataError):
    """The template needs too much time or memory."""

    kind = "template_cost"


def read_arguments(arguments: Any) -> dict[str, Any]:
    """The arguments of a call as an object; line breaks inside of strings are read as such. What is no object
    is the value of ``arguments``.
    """
    value = arguments
    with suppress(ValueError, RecursionError):
        value = json.loads(arguments or "{}", strict=False) if isinstance(arguments, str) else arguments
    if levels_exceed(value, MAX_LEVELS):
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}


def shape_of(messages: Sequence[Mapping[str, Any]]) -> tuple[MessageKind, ...]:
    """What the form may depend on. Of a long conversation the first and last turns, of those the first and
    last steps."""
    turns: list[list[list[MessageKind]]] = [[[]]]
    for message in messages:
        calls = message.get("tool_calls") or ()
        short = all(_SHORT_ID.fullmatch(str(call.get("id"))) for call in calls)
        kind = (message["role"], bool(message.get("content")), min(len(calls), 2), short)
        if message["role"] == "user":
            turns.append([[]])
        elif message["role"] == "assistant":
            turns[-1].append([])
        turns[-1][-1].append(kind)
    steps = [step for turn in _ends(turns, 16) for step in _ends(turn, 8)]
    return tuple(kind for step in steps for kind in _ends(step, 6))


def _ends(items: Sequence[Any], most: int) -> Sequence[Any]:
    """The first and the last of more than some items."""
    return items if len(items) <= most else [*items[: most // 2], *items[-(most // 2) :]]


def find_form(
    render: Render, shape: Sequence[MessageKind], tools: bool, first: MessageForm
) -> MessageForm | str:
    """The first form in which the template loses nothing of a conversation; ``first`` where it refuses all.
    A text: what is lost in the best of them.

    Args:
        first: the form to begin with; then its axes are changed that matter for texts, for tools, for calls.
    """
    texts = [
        (role, text, 0, short)
        for role, text, calls, short in shape
        if role not in _RESULTS and (text or not calls)
    ]
    has_calls = len(texts) < len(shape) or any(calls for _, _, calls, _ in shape)
    form = first
    for kinds, with_tools, axes in (
        (texts, False, _OF_TEXTS),
        ([_USER], tools, _OF_TOOLS),
        (shape, tools, (*_OF_CALLS, "system") if has_calls else ("system",)),
    ):
        result = _search(render, kinds, with_tools, _forms(form, axes))
        form = result if isinstance(result, MessageForm) else form
    return first if result is None else result


def _search(
    render: Render, shape: Sequence[MessageKind], tools: bool, forms: Sequence[MessageForm]
) -> MessageForm | str | None:
    """The first form in which nothing is lost; else what is lost in the best; None: all are refused."""
    messages, sentinels = _probe(shape)
    sentinels |= {_TOOL_NAME: "the tools", _TOOL_FIELD: "the parameters of tools"} if tools else {}
    misread: MessageForm | None = None
    least: list[str] | None = None
    for form in forms[: max(MOST_MESSAGES // max(len(messages), 1), 20)]:
        try:
            text = render(*form.apply(messages, [_TOOL] if tools else []))
        except CostlyTemplateError:
            raise
        except Exception:  # a template is a program of the model's and may raise anything
            continue
        lost = [meaning for sentinel, meaning in sentinels.items() if sentinel not in text]
        if not lost and not _MISREAD.search(text):
            return form
        if not lost:
            misread = misread or form
        elif least is None or len(lost) < len(least):
            least = lost
    return misread or (None if least is None else ", ".join(dict.fromkeys(least)))


@lru_cache(maxsize=32)
def _forms(first: MessageForm, axes: tuple[str, ...]) -> list[MessageForm]:
    """The first form, then the forms that differ from the first in some axes, by their cost."""
    changes = [dict(zip(axes, values, strict=True)) for values in product(*(_COSTS[name] for name in axes))]
    others = dict.fromkeys(replace(first, **change) for change in changes)
    costs = {
        form: _distance(form, first)
        for form in others
        if form != first and ("calls" not in axes or _matters(form, first))
    }
    return [first, *sorted(costs, key=costs.__getitem__)]


def _distance(form: MessageForm, first: MessageForm) -> int:
    """How far a form is from the first; calls in words have their results in words, too."""
    costs = {
        name: values[getattr(form, name)] - values[getattr(first, name)] for name, values in _COSTS.items()
    }
    if form.calls == "words" and form.results == "user":
        costs["results"] = 0
    return sum(map(abs, costs.values()))


def _matters(form: MessageForm, first: MessageForm) -> bool:
    """Whether each change has an effect: calls as words have no form of their own, results stay apart."""
    if form.calls == "words" and (form.arguments, form.empty, form.ids) != ("object", "", "given"):
        return False
    return form.merged == first.merged or form.results == "user"


_USER: MessageKind = ("user", True, 0, True)
_TOOL_NAME, _TOOL_FIELD = "qz_tool", "qz_field"
_PROPERTIES = {_TOOL_FIELD: {"type": "string", "description": "One."}}
_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "A tool.",
        "parameters": {"type": "object", "properties": _PROPERTIES, "required": [_TOOL_FIELD]},
    },
}
_MISREAD = re.compile(r"""'qz\w*': |\\"qz\w*\\": |\bNone\b|\[\{'""")  # Python's words, or JSON inside of JSON


def _probe(shape: Sequence[MessageKind]) -> tuple[list[PlainMessage], dict[str, str]]:
    """A conversation of a shape, and what each of its sentinels stands for."""
    messages: list[PlainMessage] = []
    sentinels: dict[str, str] = {}
    open_calls: list[str] = []

    def sentinel(meaning: str) -> str:
        text = f"qz{len(sentinels)}z"
        sentinels[text] = meaning
        return text

    def call(id: str) -> PlainMessage:
        name, *parts = map(sentinel, ("the names of calls", *["the arguments of calls"] * 2))
        function = {"name": name, "arguments": json.dumps(dict([parts]))}
        return {"id": id, "type": "function", "function": function}

    for number, (role, has_text, calls, short) in enumerate(shape):
        text = sentinel(_MEANINGS.get(role, "a message")) if has_text else ""
        message: PlainMessage = {"role": role, "content": text}
        if calls:
            form = "id{:05}{:02}" if short else "call_{}_{}"
            open_calls = [form.format(number, index) for index in range(calls)]
            message["tool_calls"] = [call(id) for id in open_calls]
        elif role in _RESULTS:
            message["tool_call_id"] = open_calls.pop(0) if open_calls else f"id{number:07}"
        messages.append(message)
    return messages, sentinels


_MEANINGS = {
    "system": "a system message",
    "user": "a user's message",
    "assistant": "an answer",
    "tool": "the results of calls",
    "function": "the results of calls",
}


def _named(messages: Sequence[Mapping[str, Any]], ids: str) -> list[PlainMessage]:
    """Messages with the ids of a form, and results with the name of the call that they answer."""
    listed: list[PlainMessage] = []
    names, written = dict[str, str](), dict[str, str]()
    for message in messages:
        changed = dict(message)
        calls = message.get("tool_calls") or ()
        for call in calls:
            id = str(call.get("id"))
            names[id] = str(call.get("function", call).get("name", ""))
            written[id] = _id(id, ids, names[id], len(written))
        if calls and ids != "given":
            changed["tool_calls"] = [{**call, "id": written[str(call.get("id"))]} for call in calls]
        if message["role"] in _RESULTS:
            id = str(message.get("tool_call_id"))
            name = message.get("name") or names.get(id)
            changed |= {"name": name} if name else {}
            changed |= (
                {"tool_call_id": written.get(id) or _id(id, ids, str(name), 0)} if ids != "given" else {}
            )
        listed.append(changed)
    return listed


def _id(id: str, form: str, name: str, number: int) -> str:
    if form == "named":
        return f"functions.{name}:{number}"
    if form == "given" or _SHORT_ID.fullmatch(id):
        return id
    return hashlib.sha256(id.encode("utf-8", "replace")).hexdigest()[:9]


def _apart(messages: Sequence[PlainMessage]) -> list[PlainMessage]:
    """Text and each call in messages of their own, results behind their calls."""
    listed: list[PlainMessage] = []
    index = 0
    while index < len(messages):
        message, index = messages[index], index + 1
        calls = message.get("tool_calls") or []
        if not calls or (len(calls) == 1 and not message["content"]):
            listed.append(message)
            continue
        results = []
        while index < len(messages) and messages[index]["role"] in _RESULTS:
            results.append(messages[index])
            index += 1
        alone = {key: value for key, value in message.items() if key != "tool_calls"}
        listed += [alone] if message["content"] else []
        for call in calls:
            listed.append({"role": message["role"], "content": "", "tool_calls": [call]})
            matching = [result for result in results if result.get("tool_call_id") == call.get("id")][:1]
            listed += matching
            results = [result for result in results if result not in matching]
        listed += results
    return listed


def _with_system(messages: list[PlainMessage], text: str) -> list[PlainMessage]:
    """A text at the end of the system message, or as one."""
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _system_in_user(messages: Sequence[PlainMessage]) -> list[PlainMessage]:
    """System messages at the head of the user message that follows."""
    listed: list[PlainMessage] = []
    heads: list[str] = []
    for message in messages:
        if message["role"] == "system":
            heads.append(message["content"])
        elif heads and message["role"] == "user":
            listed.append({**message, "content": "\n\n".join([*heads, message["content"]])})
            heads = []
        else:
            listed += [{"role": "user", "content": "\n\n".join(heads)}] if heads else []
            listed.append(message)
            heads = []
    return listed + ([{"role": "user", "content": "\n\n".join(heads)}] if heads else [])


def _merged(messages: Sequence[PlainMessage]) -> list[PlainMessage]:
    """Messages of one role that follow each other as one; calls and their results stay as they are."""
    listed: list[PlainMessage] = []
    for message in messages:
        last = listed[-1] if listed else {}
        same = last.get("role") == message["role"] and message["role"] in ("system", "user", "assistant")
        if same and not last.get("tool_calls") and not message.get("tool_calls"):
            texts = [text for text in (last["content"], message["content"]) if text]
            listed[-1] = {**last, **message, "content": "\n\n".join(texts)}
        else:
            listed.append(message)
    return listed


def _in_parts(message: PlainMessage) -> PlainMessage:
    text = message["content"]
    return {**message, "content": [{"type": "text", "text": text}] if text else []}
