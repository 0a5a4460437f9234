"""How a family of models writes calls: its parser, and a grammar that allows nothing but calls.

The grammar is Lark's, with the tool's own JSON schema for its arguments:

    start: calls                       call0: "<tool_call>..." arguments0 "..."
    calls: call (BETWEEN call)*        arguments0: %json {...}
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from attar.runtime.sampling.json_schema import SchemaRules, UnsupportedSchemaError, resolve
from attar.serving.http.tool_calls.parser import CallParser
from attar.serving.http.tool_calls.tag_value import value_rules

MAX_CALLS = 16  # of one answer that a grammar holds

_OF_OBJECTS = frozenset(
    (
        *(
            "anyOf",
            "oneOf",
            "allOf",
            "not",
            "if",
            "then",
            "else",
            "const",
            "enum",
            "minProperties",
            "maxProperties",
        ),
        *("patternProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
        "unevaluatedProperties",
    )
)
_PYTHON_NAME, _TAG_NAME = re.compile(r"[A-Za-z_][\w.-]*"), re.compile(r"[^<>\s](?:[^<>\n]*[^<>\s])?")
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

    Raises:
        UnsupportedSchemaError: the grammar cannot hold calls to the parameters of a tool.
    """
    more = form.most_calls - 1 if parallel else 0
    many = f"({_literal(form.between)} call){{0,{more}}}" if more else ""
    bracket = [_literal(text) for text in "[]"] if form.bracketed else ["", ""]
    rules = [f"calls: {_mark(form.opening, token_of)} {bracket[0]} call {many} {bracket[1]}"]
    rules.append("call: " + " | ".join(f"call{index}" for index in range(len(tools))))
    for index, (name, parameters) in enumerate(tools.items()):
        before, after = _literal(form.before.format(name=name), token_of), _literal(form.after)
        body, extra = _ARGUMENTS[form.arguments](f"arguments{index}", _object_schema(parameters))
        rules += extra
        rules.append(f"call{index}: {_mark(form.mark, token_of)} {before} {body} {after}")
    if answer is not None:
        schema = json.loads(answer)
        answers = SchemaRules(schema, "answer_json")
        rules += [f"answer: {answers.value(schema)}", *answers.rules]
    start = "start: calls" if answer is None else "start: calls | answer"
    return "\n".join(dict.fromkeys([start, *rules]))


def _object_schema(parameters: Any) -> Mapping[str, Any]:
    """The parameters of a tool as the schema of an object; without one, of any object."""
    schema = {"type": "object", **(parameters or {})}
    if schema["type"] != "object":
        raise UnsupportedSchemaError(f"parameters of type {str(schema['type'])[:40]!r}")
    return schema


def _json_arguments(name: str, parameters: Mapping[str, Any]) -> tuple[str, list[str]]:
    """One object of the schema."""
    rules = SchemaRules(parameters, name)
    return rules.value(parameters), rules.rules


def _python_arguments(name: str, parameters: Mapping[str, Any]) -> tuple[str, list[str]]:
    """``name=value, ...``: the required arguments, then any of the others, in the schema's order; values are
    JSON, whose words the parser knows.

        more0: (", " optional0)? more1        any of the optional ones from the first on, after another
    """
    properties, required = _members(parameters)
    names = sorted(properties, key=lambda key: key not in required)
    values, rules = SchemaRules(parameters, f"{name}_json"), list[str]()
    for number, key in enumerate(names):
        if _PYTHON_NAME.fullmatch(key) is None:
            raise UnsupportedSchemaError(f"the parameter {key[:40]!r}, which is no name of Python")
        rules.append(f"{name}_{number}: {_literal(key + '=')} {values.value(properties[key])}")
    rules += values.rules
    count, comma = sum(key in required for key in names), _literal(", ")
    optional = [f"{name}_{number}" for number in range(count, len(names))]
    for number, rule in enumerate(optional):
        following = f"{name}_more{number + 1}" if number + 1 < len(optional) else ""
        rules.append(f"{name}_more{number}: ({comma} {rule})? {following}")
        rules.append(f"{name}_first{number}: {rule} {following}")
    if count:
        all_required = f" {comma} ".join(f"{name}_{number}" for number in range(count))
        return f"{all_required} {name}_more0" if optional else all_required, rules
    firsts = " | ".join(f"{name}_first{number}" for number in range(len(optional)))
    return f"({firsts})?" if firsts else "", rules


def _xml_parameters(name: str, parameters: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The parameters of a call in tags, in the schema's order."""
    properties, required = _members(parameters)
    tags, rules = [], []
    for number, (key, schema) in enumerate(properties.items()):
        if not _TAG_NAME.fullmatch(key):
            raise UnsupportedSchemaError(f"the parameter {key[:40]!r}, which is no name of a tag")
        value, of_value = value_rules(f"{name}_{number}", schema, parameters)
        rules += [f"{name}_{number}: {_literal(f'<parameter={key}>' + chr(10))} {value}", *of_value]
        tags.append(f"{name}_{number}" if key in required else f"{name}_{number}?")
    return " ".join(tags), rules


_ARGUMENTS = {"json": _json_arguments, "xml": _xml_parameters, "python": _python_arguments}


def _members(parameters: Mapping[str, Any]) -> tuple[dict[str, Any], Collection[str]]:
    """The schemas of the parameters by name, and the names that are required.

    Raises:
        UnsupportedSchemaError: words about the object as a whole, for forms that write each parameter alone.
    """
    parameters = resolve(parameters, parameters)
    others = sorted(set(parameters) & _OF_OBJECTS)
    if others:
        raise UnsupportedSchemaError(f"{', '.join(others)} of parameters")
    required = parameters.get("required") or ()
    return dict.fromkeys(required, True) | dict(parameters.get("properties") or {}), required


def _mark(text: str, token_of: TokenOf) -> str:
    token = token_of(text) if text else None
    return _literal(text) if token is None else f"<[{token}]>"


def _literal(text: str, token_of: TokenOf = lambda text: None) -> str:
    """A text in Lark, special tokens in it as such; nothing where it is empty."""
    parts = [(part, token_of(part)) for part in _SPECIAL.split(text) if part]
    return " ".join(json.dumps(part) if token is None else f"<[{token}]>" for part, token in parts)
