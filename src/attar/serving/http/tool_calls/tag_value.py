"""The value of a parameter that stands as text in a tag: a string as it is, any other value in JSON.

    Paris        {"type": "string"}                5        {"type": "integer"}
    null         {"anyOf": [{"type": "string"}, {"type": "null"}]}

:func:`value_rules` and :func:`read_value` agree: each text of the grammar is read as a value of the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attar.runtime.sampling.integer_regex import integer_regex
from attar.runtime.sampling.json_schema import SchemaRules, UnsupportedSchemaError, literal, resolve
from attar.serving.http.tool_calls.pythonic import literal as python_value

CLOSING = "\n</parameter>\n"  # as a grammar writes it
END = (
    r"</parameter>(?=\s*<(parameter=|/function>|/tool_call>))"  # of a value: its text may have the tag alone
)
MAX_DEPTH = 32  # of unions in unions
_ENDS_ONCE = (  # its first closing ends a value, and so does each end that the parser sees
    r"/(?s:.*)/ & ~/(?s:.*)\n<\/parameter>\n(?s:.+)/"
    r" & ~/(?s:.*)<\/parameter>[ \t\r\n]*<(parameter=|\/function>|\/tool_call>)(?s:.*)/"
)
_UNIONS = ("anyOf", "oneOf")
_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "email": rf"[A-Za-z0-9.!#$%&'*+=?^_`{{|}}~-]+@{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[!-~]+",
}
_TYPES: Mapping[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
}
_SCALARS = ("null", "boolean", "integer", "number")
_UNREAD = frozenset(
    ("title", "description", "default", "examples", "$comment", "$defs", "definitions", "type")
)
_OF_STRINGS = frozenset(("minLength", "maxLength", "pattern", "format"))
_OF_NUMBERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))


@dataclass
class ValueKinds:
    """What a value may be.

    Attributes:
        constants: these values.
        texts: strings of these schemas.
        others: JSON of these schemas, each with one type.
    """

    constants: list[Any] = field(default_factory=list)
    texts: list[Mapping[str, Any]] = field(default_factory=list)
    others: list[Mapping[str, Any]] = field(default_factory=list)


def kinds_of(schema: Any, root: Any) -> ValueKinds:
    """What a schema allows; without a type, a string.

    Raises:
        UnsupportedSchemaError: unions of references to each other, or several schemas that hold together.
    """
    kinds = ValueKinds()
    stack: list[tuple[Any, int]] = [(schema, 0)]
    while stack:
        schema, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise UnsupportedSchemaError(f"unions {MAX_DEPTH} levels deep")
        schema = resolve(schema, root)
        schema = schema if isinstance(schema, Mapping) else {}
        options = _options(schema)
        if options is not None:
            stack += [(option, depth + 1) for option in reversed(options)]
        elif "const" in schema or "enum" in schema:
            kinds.constants += [schema["const"]] if "const" in schema else schema["enum"]
        elif schema["type"] == "string":
            kinds.texts.append(schema)
        else:
            kinds.others.append(schema)
    return kinds


def _options(schema: Mapping[str, Any]) -> list[Any] | None:
    """The schemas of a union, with the words beside it; None: the schema is none, and has one type."""
    for union in (*_UNIONS, "allOf"):
        if union in schema:
            options = schema[union]
            if union == "allOf" and len(options) > 1:
                raise UnsupportedSchemaError("allOf of several schemas")
            siblings = {key: value for key, value in schema.items() if key != union}
            return [{**siblings, **option} if isinstance(option, Mapping) else option for option in options]
    kind = schema.get("type")
    if kind is None and not ("const" in schema or "enum" in schema):
        words = {"object": ("properties",), "array": ("items", "prefixItems"), "number": _OF_NUMBERS}
        kind = next(
            (kind for kind, of_kind in words.items() if any(word in schema for word in of_kind)), "string"
        )
        return [{**schema, "type": kind}]
    return [{**schema, "type": kind} for kind in schema["type"]] if isinstance(kind, list) else None


def value_rules(name: str, schema: Any, root: Any) -> tuple[str, list[str]]:
    """A Lark expression of a value up to the closing of its tag, and the rules that it needs.

    Args:
        name: of the rules.

    Raises:
        UnsupportedSchemaError: what cannot be enforced.
    """
    kinds = kinds_of(schema, root)
    rules = SchemaRules(root, f"{name}_json")
    if not kinds.texts and not kinds.constants:
        return f"{rules.value(schema)} {literal(CLOSING)}", rules.rules
    structures = [other for other in kinds.others if other["type"] not in _SCALARS]
    scalars = [other for other in kinds.others if other["type"] in _SCALARS]
    texts = [_text_terminal(text, bool(structures)) for text in kinds.texts]
    texts += [_constant(value) for value in kinds.constants]
    if not any(set(text) <= _UNREAD for text in kinds.texts):  # else scalars are texts already
        texts += [_scalar(scalar) for scalar in scalars]
    terminal = f"{name}_text".upper()
    parts = [terminal, *(f"{rules.value(structure)} {literal(CLOSING)}" for structure in structures)]
    if texts == ["/(?s:.*)/"]:
        terminal = parts[0] = "TAG_TEXT"  # of all parameters
    closed = [
        f"TAG_ENDS_ONCE: {_ENDS_ONCE}",
        f"{terminal}: {terminal}_ANY & TAG_ENDS_ONCE",
        f"{terminal}_ANY: ({' | '.join(texts)}) {literal(CLOSING)}",
    ]
    return f"({' | '.join(parts)})", [*closed, *rules.rules]


def read_value(text: str, schema: Any, root: Any) -> Any:
    """The value of a text: what the schema allows; without strings among it, JSON or a literal of Python."""
    try:
        kinds = kinds_of(schema, root)
    except UnsupportedSchemaError:
        return text
    value = _from_json(text)
    for constant in kinds.constants:
        if text == constant or (not isinstance(constant, str) and _same(value, constant)):
            return constant
    if any(_fits(value, other) for other in kinds.others):
        return value
    if kinds.texts or value is not _NONE:
        return text if kinds.texts or not kinds.others else value
    words = {"true": True, "false": False, "none": None, "null": None}
    word = text.strip().lower()
    if word in words:
        return words[word]
    try:
        return python_value(text.strip())
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return text


_NONE = object()  # no value


def _from_json(text: str) -> Any:
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _NONE


def _refuse(word: str) -> Any:
    raise ValueError(word)


def _same(value: Any, constant: Any) -> bool:
    return type(value) is type(constant) and bool(value == constant)


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value is of a schema's type and in its bounds."""
    kind = schema["type"]
    if not isinstance(value, _TYPES.get(kind, ())) or (isinstance(value, bool) and kind != "boolean"):
        return False
    if kind not in ("integer", "number"):
        return True
    factor, above, below = (
        schema.get(word) for word in ("multipleOf", "exclusiveMinimum", "exclusiveMaximum")
    )
    inside = schema.get("minimum", value) <= value <= schema.get("maximum", value)
    inside = inside and (above is None or value > above) and (below is None or value < below)
    return bool(inside and (not factor or value % factor == 0))


def _text_terminal(schema: Mapping[str, Any], structures: bool) -> str:
    """Strings; beside arrays and objects, none that begins as one."""
    words = set(schema) - _UNREAD
    if words - _OF_STRINGS:
        raise UnsupportedSchemaError(f"{', '.join(sorted(words - _OF_STRINGS))} of a string in a tag")
    parts = ["/(?s:.*)/"]
    parts += [r"/([^\[{](?s:.*))?/"] if structures else []
    if "minLength" in words or "maxLength" in words:
        parts.append(f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/")
    if "pattern" in words:
        parts.append(f"/{_search(schema['pattern'])}/")
    if "format" in words:
        if schema["format"] not in FORMATS:
            raise UnsupportedSchemaError(f"format {str(schema['format'])[:40]!r} in a tag")
        parts.append(f"/{_slashes(FORMATS[schema['format']])}/")
    return f"({' & '.join(parts)})" if len(parts) > 1 else parts[0]


def _constant(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if CLOSING in text or re.search(END, text):
        raise UnsupportedSchemaError("the end of a tag in a value")
    return literal(text)


def _scalar(schema: Mapping[str, Any]) -> str:
    """A terminal of JSON without parts; numbers without bounds, and integers with them."""
    kind = schema["type"]
    words = set(schema) - _UNREAD - {"format"}
    if kind == "integer" and words <= {"minimum", "maximum"}:
        return f"/{integer_regex(schema.get('minimum'), schema.get('maximum'))}/"
    if words:
        raise UnsupportedSchemaError(f"{', '.join(sorted(words))} beside strings in a tag")
    return {"null": '"null"', "boolean": "/true|false/", "number": f"/{_slashes(_NUMBER)}/"}[str(kind)]


def _search(pattern: str) -> str:
    """A regular expression of the texts in which a pattern is found."""
    start, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    body = pattern[int(start) : len(pattern) - int(end)]
    bare = re.sub(r"\\.|\[(\\.|[^\]\\])*\]", "", body)
    depths = [
        bare[:position].count("(") - bare[:position].count(")") for position, c in enumerate(bare) if c == "|"
    ]
    if (
        "^" in bare
        or "$" in bare
        or ((start or end) and 0 in depths)
        or "(?=" in bare
        or "(?!" in bare
        or "(?<" in bare
    ):
        raise UnsupportedSchemaError(f"the pattern {pattern[:40]!r} in a tag")
    body = re.sub(r"\[(?:\\.|[^\]\\])*\]", lambda part: part[0].replace(r"\d", "0-9"), body).replace(
        r"\d", "[0-9]"
    )
    lead, trail = "" if start else "(?s:.*)", "" if end else "(?s:.*)"
    return _slashes(f"{lead}({body}){trail}")


def _slashes(regex: str) -> str:
    return re.sub(r"(?<!\\)/", r"\/", regex)
