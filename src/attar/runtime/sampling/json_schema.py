"""JSON schemas for the grammar library: the list of what answers, structured outputs and calls are held to.

    enforced   type, enum, const, anyOf, allOf, oneOf of disjoint schemas, $ref inside of the schema,
               properties, required, additionalProperties, patternProperties, min/maxProperties where all are
               required, items, prefixItems, min/maxItems, min/maxLength in characters, pattern without
               look-around, format (date, time, date-time, duration, email, hostname, ipv4, ipv6, uuid, uri),
               minimum, maximum, exclusive bounds, multipleOf
    read over  title, description, default, examples, and words that JSON Schema does not have
    refused    all others of its words, in one line: not, if, uniqueItems, contains, dependentRequired, ...

The library reads numbers as doubles. Where integers beyond 2^53 are in a schema, the values around them are
written as rules of a Lark grammar, with exact integers, and all others stay schemas:

    object0: "{" pair0 ("," pair1)? "}"      pair0: "\\"id\\"" ":" INTEGER0      pair1: "\\"name\\"" ":" json0
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from attar.runtime.sampling.integer_regex import integer_regex

BLANKS = r"\x20?"  # between JSON's parts: a weak model can repeat them without end
EXACT = 2**53  # integers up to it are doubles
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_UNREAD = frozenset(
    (
        *(
            "title",
            "description",
            "default",
            "examples",
            "$comment",
            "$schema",
            "$id",
            "readOnly",
            "writeOnly",
        ),
        *("$defs", "definitions", "deprecated", "format"),
    )
)
_DEFINITIONS = ("$defs", "definitions")
_OF_NAMES = (*_DEFINITIONS, "properties", "patternProperties", "dependentSchemas")  # whose keys are names
_SAYING_NOTHING = ("title", "description", "default", "examples", "$comment")


class UnsupportedSchemaError(ValueError):
    """A schema that no grammar can hold an answer to; the reason in one line."""


def with_definitions(schema: Any, root: Any) -> Any:
    """A part of a schema, with the definitions that it may refer to."""
    if not isinstance(schema, Mapping) or not isinstance(root, Mapping):
        return schema
    return {**{key: root[key] for key in _DEFINITIONS if key in root}, **schema}


def resolve(schema: Any, root: Any) -> Any:
    """What a schema refers to, with its own words beside ``$ref``.

    Raises:
        UnsupportedSchemaError: the reference is to nothing inside of the schema, or to itself.
    """
    seen: list[str] = []
    while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        reference = schema["$ref"]
        target = _pointed(reference, root)
        if reference in seen or target is None:
            raise UnsupportedSchemaError(f"{reference!r} is no schema inside of this one")
        seen.append(reference)
        siblings = {key: value for key, value in schema.items() if key != "$ref"}
        schema = {**target, **siblings} if isinstance(target, Mapping) and siblings else target
    return schema


def _pointed(reference: str, root: Any) -> Any:
    """The schema at a JSON pointer; None: there is none."""
    value = root if reference.startswith("#") else None
    for part in reference[1:].split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping | bool) else None


def has_large(value: Any) -> bool:
    """Whether integers are in a value that a double cannot hold."""
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, int) and abs(value) > EXACT:
            return True
        stack += value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return False


def bare(schema: Any, root: Any) -> Any:
    """The schema without words that allow or forbid nothing, and with the references in ``oneOf`` replaced by
    what they refer to: only then the library sees that no two of them hold for one value."""
    if isinstance(schema, list):
        return [bare(item, root) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    changed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _OF_NAMES and isinstance(value, Mapping):
            changed[key] = {name: bare(item, root) for name, item in value.items()}
        elif key in ("const", "enum"):
            changed[key] = value
        elif key == "oneOf" and isinstance(value, list):
            changed[key] = [bare(_resolved(option, root), root) for option in value]
        elif key not in _SAYING_NOTHING:
            changed[key] = bare(value, root)
    return changed


def _resolved(option: Any, root: Any) -> Any:
    try:
        return resolve(option, root)
    except UnsupportedSchemaError:
        return option


def schema_grammar(schema: Mapping[str, Any] | bool) -> tuple[str, str]:
    """``json``, and the schema for the library; or ``lark``, and the rules of one with large integers.

    Raises:
        UnsupportedSchemaError: see :meth:`SchemaRules.value`.
    """
    rules = SchemaRules(schema)
    if not rules.is_large(schema):
        return "json", rules.readable(schema)
    start = rules.value(schema)
    return "lark", "\n".join([f"start: {start}", *rules.rules])


class SchemaRules:
    """Writes schemas as rules of one Lark grammar.

    Args:
        root: the schema that references are into.
        prefix: of the rules' names.
    """

    def __init__(self, root: Any, prefix: str = "json") -> None:
        self._root, self._prefix = root, prefix
        shared = root if isinstance(root, Mapping) else {}
        self._definitions = {key: shared[key] for key in _DEFINITIONS if key in shared}
        self.rules: list[str] = []
        self._references: dict[str, str] = {}
        self._count = 0

    def value(self, schema: Any) -> str:
        """The name of a rule for the values of a schema.

        Raises:
            UnsupportedSchemaError: integers beyond 2^53 beside words that cannot be written as rules.
        """
        if not self.is_large(schema):
            complete = (
                dict(with_definitions(bare(schema, self._root), self._root)) if schema is not True else {}
            )
            complete["x-guidance"] = {"whitespace_pattern": BLANKS}
            return self._rule(f"%json {json.dumps(complete)}")
        reference = schema.get("$ref")
        if reference is not None and not set(schema) - _UNREAD - {"$ref"}:
            return self._reference(reference)
        return self._large(resolve(schema, self._root))

    def readable(self, schema: Any) -> str:
        """A schema for the library, with what it refers to and bounded blanks."""
        complete = {} if schema is True else {"enum": []} if schema is False else bare(schema, self._root)
        if not isinstance(complete, Mapping):
            raise UnsupportedSchemaError(f"{json.dumps(schema)[:60]} is no schema")
        if '"$ref"' in json.dumps(complete):
            complete = with_definitions(complete, bare(self._definitions, self._root))
        return json.dumps({**complete, "x-guidance": {"whitespace_pattern": BLANKS}})

    def is_large(self, schema: Any) -> bool:
        """Whether large integers are in a schema, or in what it refers to."""
        stack, seen = [schema], set[str]()
        while stack:
            value = stack.pop()
            if isinstance(value, int) and abs(value) > EXACT:
                return True
            if isinstance(value, Mapping):
                stack += [item for key, item in value.items() if key not in _UNREAD]
                reference = value.get("$ref")
                if isinstance(reference, str) and reference not in seen:
                    seen.add(reference)
                    stack.append(_pointed(reference, self._root))
            elif isinstance(value, list):
                stack += value
        return False

    def _reference(self, reference: str) -> str:
        if reference not in self._references:
            name = self._references[reference] = self._name()
            target = self.value(resolve({"$ref": reference}, self._root))
            self.rules.append(f"{name}: {target}")
        return self._references[reference]

    def _large(self, schema: Mapping[str, Any]) -> str:
        words = set(schema) - _UNREAD
        if "const" in words or "enum" in words:
            return self._constants(schema)
        for union in ("anyOf", "oneOf"):
            if union in words:
                self._only(words, {union})
                if union == "oneOf" and not _differ(
                    [resolve(option, self._root) for option in schema[union]]
                ):
                    raise UnsupportedSchemaError("oneOf of schemas that may hold for one value")
                return self._rule(" | ".join(self.value(option) for option in schema[union]))
        inferred = "object" if "properties" in words else "array" if "items" in words else None
        kinds = schema.get("type", inferred)
        if isinstance(kinds, list):
            return self._rule(" | ".join(self.value({**schema, "type": kind}) for kind in kinds))
        if kinds in ("integer", "number"):
            self._only(words, {"type", *_BOUNDS})
            return self._rule(_terminal(_number(schema, kinds == "integer")))
        if kinds == "array":
            return self._array(schema, words)
        if kinds == "object":
            return self._object(schema, words)
        if kinds in ("string", "boolean", "null"):
            return self.value({key: value for key, value in schema.items() if key not in _BOUNDS})
        raise UnsupportedSchemaError(f"integers beyond 2^53 beside {', '.join(sorted(words))}")

    def _constants(self, schema: Mapping[str, Any]) -> str:
        values = [schema["const"]] if "const" in schema else list(schema["enum"])
        others = {key: value for key, value in schema.items() if key not in ("const", "enum")}
        if set(others) - _UNREAD - {"type"}:
            self._only(set(others) - _UNREAD, {"type"})
        large = [value for value in values if has_large(value)]
        parts = [literal(json.dumps(value, separators=(",", ":"))) for value in large]
        small = [value for value in values if not has_large(value)]
        parts += [self.value({**others, "enum": small})] if small else []
        return self._rule(" | ".join(parts))

    def _array(self, schema: Mapping[str, Any], words: set[str]) -> str:
        self._only(words, {"type", "items", "minItems", "maxItems"})
        item, least, most = self.value(schema["items"]), schema.get("minItems", 0), schema.get("maxItems")
        more = "" if most is None else max(most - 1, 0)
        items = f"{item} ({_COMMA} {item}){{{max(least - 1, 0)},{more}}}"
        items = "" if most == 0 else f"({items})" if least else f"({items})?"
        return self._rule(f'"[" {_BLANK} {items} {_BLANK} "]"')

    def _object(self, schema: Mapping[str, Any], words: set[str]) -> str:
        """The members in the schema's order. Of other members that the schema may allow, the members with a
        schema."""
        self._only(words, {"type", "properties", "required", "additionalProperties"})
        properties = dict(schema.get("properties") or {})
        required = schema.get("required") or []
        others = schema.get("additionalProperties")
        missing = [name for name in required if name not in properties]
        properties |= dict.fromkeys(missing, others if isinstance(others, Mapping) else True)
        pairs = [
            (self._pair(literal(json.dumps(name, ensure_ascii=False)), value), name in required)
            for name, value in properties.items()
        ]
        first = following = ""
        if isinstance(others, Mapping):
            names = [json.dumps(name, ensure_ascii=False) for name in properties]
            key = _terminal(_STRING) + "".join(f" & ~{literal(name)}" for name in names)
            pair = self._pair(self._rule(key, upper=True), others)
            first, following = (
                self._rule(text) for text in (f"({pair} ({_COMMA} {pair})*)?", f"({_COMMA} {pair})*")
            )
        return self._rule(f'"{{" {_BLANK} {self._members(pairs, first, following)} {_BLANK} "}}"')

    def _members(self, pairs: Sequence[tuple[str, bool]], first: str, following: str) -> str:
        """Members in their order, the optional ones or not.

        Args:
            pairs: a rule, and whether it is required.
            first, following: what may stand behind them, as the first or after others.
        """
        for pair, needed in reversed(pairs):
            alone = f"{pair} {following}"
            if needed:
                first, following = alone, f"{_COMMA} {pair} {following}"
            else:
                first = f"{alone} | {first}" if first else f"({alone})?"
                following = f"({_COMMA} {pair})? {following}"
            first, following = self._rule(first), self._rule(following)
        return first

    def _pair(self, key: str, value: Any) -> str:
        return self._rule(f'{key} {_BLANK} ":" {_BLANK} {self.value(value)}')

    def _rule(self, body: str, upper: bool = False) -> str:
        name = self._name().upper() if upper else self._name()
        self.rules.append(f"{name}: {body}")
        return name

    def _name(self) -> str:
        self._count += 1
        return f"{self._prefix}_{self._count}"

    @staticmethod
    def _only(words: set[str], known: set[str]) -> None:
        if words - known:
            raise UnsupportedSchemaError(f"integers beyond 2^53 beside {', '.join(sorted(words - known))}")


_BLANK = '" "?'  # BLANKS
_COMMA = f'{_BLANK} "," {_BLANK}'
_STRING = r'"([^"\\\x00-\x1f\x7f]|\\(["\\bfnrt]|u00[01][0-9a-f]))*"'


def literal(text: str) -> str:
    """A text in Lark."""
    return json.dumps(text)


def _terminal(regex: str) -> str:
    return "/" + regex.replace("/", r"\/") + "/"


def _number(schema: Mapping[str, Any], integer: bool) -> str:
    """A regular expression of the numbers in a schema's bounds."""
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    bounds = [bound for bound in (low, high, above, below) if bound is not None]
    if not all(isinstance(bound, int) for bound in bounds):
        raise UnsupportedSchemaError("integers beyond 2^53 beside a bound that is no integer")
    if integer:
        low, high = _exclusive(low, above, max, 1), _exclusive(high, below, min, -1)
        return integer_regex(low, high)
    if above is not None or below is not None:
        raise UnsupportedSchemaError("exclusive bounds beyond 2^53 of numbers that are no integers")
    parts = [integer_regex(low, high)]
    if high is None or high > 0:
        parts.append(integer_regex(max(low or 0, 0), None if high is None else high - 1) + r"\.[0-9]+")
    if low is None or low < 0:
        least = 0 if high is None or high >= 0 else -high
        parts.append("-" + integer_regex(least, None if low is None else -low - 1) + r"\.[0-9]+")
    return "|".join(f"({part})" for part in parts)


def _exclusive(bound: int | None, exclusive: int | bool | None, choose: Any, step: int) -> int | None:
    """A bound of integers from both kinds; draft 4 says with true that the bound itself is excluded."""
    if isinstance(exclusive, bool):
        return bound + step if exclusive and bound is not None else bound
    bounds = [
        value for value in (bound, None if exclusive is None else exclusive + step) if value is not None
    ]
    result: int | None = choose(bounds) if bounds else None
    return result


def _differ(options: Sequence[Any]) -> bool:
    """Whether schemas are of different types."""
    kinds = [option.get("type") if isinstance(option, Mapping) else None for option in options]
    kinds = ["number" if kind == "integer" else kind for kind in kinds]
    return (
        None not in kinds and all(isinstance(kind, str) for kind in kinds) and len(set(kinds)) == len(kinds)
    )
