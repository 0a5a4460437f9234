"""How a family of models writes calls: its parser, and a grammar that allows nothing but calls.

The grammar is Lark's, with the tool's own JSON schema for its arguments:

    start: calls                       call0: "<tool_call>..." arguments0 "..."
    calls: call (BETWEEN call)*        arguments0: %json {...}
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from attar.runtime.sampling.json_schema import BLANKS
from attar.runtime.server.tool_calls.parser import CallParser

MAX_CALLS = 16  # of one answer that a grammar holds

_SPECIAL = re.compile(r"(<\|\w+\|>)")

TokenOf = Callable[[str], int | None]
"""The id of a special token; None where a text is none."""


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """The form of one family.

    Args:
        parser: reads an answer; see :class:`CallParser`.
        signs: words of chat templates that teach this form.
        opening, mark: what begins the calls, and each of them; perhaps special tokens.
        before, after: around the arguments of a call; ``before`` has the tool's name.
        between: of two calls.
        bracketed: all calls are in one list.
        arguments: how they are written: an object of JSON, a tag for each, or ``name=value``.
        most_calls: of an answer that a grammar holds.
        channels: the parser reads every answer, with tools or without: reasoning and text have marks, too.
        id_length: letters and digits of a call's id, where a template counts them; 0: any.
    """

    parser: Callable[[dict[str, Any]], CallParser]
    signs: tuple[str, ...] = ()
    opening: str = ""
    mark: str = ""
    before: str
    after: str
    between: str
    bracketed: bool = False
    arguments: Literal["json", "xml", "python"] = "json"
    most_calls: int = MAX_CALLS
    channels: bool = False
    id_length: int = 0

    def is_in(self, template: str) -> bool:
        """Whether a chat template teaches this form."""
        return any(sign in template for sign in self.signs)

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that must be seen in the answer, though they may be special tokens."""
        return tuple(text for text in (self.opening, self.mark, *self.signs) if text)


def call_grammar(
    form: CallFormat,
    tools: Mapping[str, Any],
    *,
    parallel: bool,
    token_of: TokenOf = lambda text: None,
    answer: str | None = None,
) -> str:
    """A grammar of calls.

    Args:
        tools: parameters (a JSON schema) of the tools that may be called, by name.
        parallel: several calls are allowed.
        token_of: special tokens are written as such.
        answer: a JSON schema of an answer without calls, which then is allowed, too.
    """
    more = form.most_calls - 1 if parallel else 0
    many = f"({_literal(form.between)} call){{0,{more}}}" if more else ""
    bracket = [_literal(text) for text in "[]"] if form.bracketed else ["", ""]
    rules = [f"calls: {_mark(form.opening, token_of)} {bracket[0]} call {many} {bracket[1]}"]
    rules.append("call: " + " | ".join(f"call{index}" for index in range(len(tools))))
    for index, (name, parameters) in enumerate(tools.items()):
        before, after = _literal(form.before.format(name=name), token_of), _literal(form.after)
        body, extra = _ARGUMENTS[form.arguments](index, parameters or {})
        rules += extra
        rules.append(f"call{index}: {_mark(form.mark, token_of)} {before} {body} {after}")
    if answer is not None:
        rules.append(f"answer: %json {_schema_text(json.loads(answer))}")
    start = "start: calls" if answer is None else "start: calls | answer"
    return "\n".join([start, *rules])


def _json_arguments(index: int, parameters: Mapping[str, Any]) -> tuple[str, list[str]]:
    """One object of the schema."""
    return f"arguments{index}", [f"arguments{index}: %json {_schema_text(parameters)}"]


def _python_arguments(index: int, parameters: Mapping[str, Any]) -> tuple[str, list[str]]:
    """``name=value, ...``: those that are required, then any of the others, in the schema's order; values are
    JSON, whose words the parser knows.

        more0: (", " optional0)? more1        any of the optional ones from the first on, after another
    """
    required, properties = parameters.get("required") or [], parameters.get("properties") or {}
    names = sorted(properties, key=lambda name: name not in required)
    rules = []
    for number, name in enumerate(names):
        rule = f"arguments{index}_{number}"
        rules += [f"{rule}: {_literal(name + '=')} {rule}_json"]
        schema = _with_definitions(properties[name], parameters)
        rules += [f"{rule}_json: %json {_schema_text(schema, any_value=True)}"]
    count, comma = sum(name in required for name in names), _literal(", ")
    optional = [f"arguments{index}_{number}" for number in range(count, len(names))]
    for number, rule in enumerate(optional):
        following = f"more{index}_{number + 1}" if number + 1 < len(optional) else ""
        rules.append(f"more{index}_{number}: ({comma} {rule})? {following}")
        rules.append(f"first{index}_{number}: {rule} {following}")
    if count:
        all_required = f" {comma} ".join(f"arguments{index}_{number}" for number in range(count))
        return f"{all_required} more{index}_0" if optional else all_required, rules
    firsts = " | ".join(f"first{index}_{number}" for number in range(len(optional)))
    return f"({firsts})?" if firsts else "", rules


def _xml_parameters(index: int, parameters: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The parameters of a call in tags, in the schema's order: each text, or JSON of its own schema."""
    required = parameters.get("required") or []
    names, rules = [], []
    for number, (name, schema) in enumerate((parameters.get("properties") or {}).items()):
        rule = f"arguments{index}_{number}"
        kind = schema.get("type", "string") if isinstance(schema, Mapping) else "string"
        lead, close = _literal(f"<parameter={name}>\n"), _literal("\n</parameter>\n")
        if kind == "string":
            rules.append(f"{rule}: {lead} /[^<]*/ {close}")
        else:
            rules.append(f"{rule}: {lead} {rule}_json {close}")
            rules.append(f"{rule}_json: %json {_schema_text(schema)}")
        names.append(rule if name in required else f"{rule}?")
    return " ".join(names), rules


_ARGUMENTS = {"json": _json_arguments, "xml": _xml_parameters, "python": _python_arguments}


def _with_definitions(schema: Any, parameters: Mapping[str, Any]) -> Any:
    """The schema of one parameter, with the definitions that it may refer to."""
    shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    return {**shared, **schema} if isinstance(schema, Mapping) else schema


def _schema_text(schema: Any, any_value: bool = False) -> str:
    """A schema for llguidance, with bounded blanks; without one, any object, or any value at all."""
    anything: dict[str, Any] = {} if any_value else {"type": "object"}
    whole = dict(schema) if isinstance(schema, Mapping) and schema else anything
    return json.dumps(whole | {"x-guidance": {"whitespace_pattern": BLANKS}})


def _mark(text: str, token_of: TokenOf) -> str:
    token = token_of(text) if text else None
    return _literal(text) if token is None else f"<[{token}]>"


def _literal(text: str, token_of: TokenOf = lambda text: None) -> str:
    """A text in Lark, special tokens in it as such; nothing where it is empty."""
    parts = [(part, token_of(part)) for part in _SPECIAL.split(text) if part]
    return " ".join(json.dumps(part) if token is None else f"<[{token}]>" for part, token in parts)
