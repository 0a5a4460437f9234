"""What a schema allows and what not, kind by kind: each text is one of the grammar's or none."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("llguidance")

from attar.errors import SettingsError
from attar.models.loading.load import load_tokenizer
from attar.runtime.sampling.grammar import Grammars
from attar.runtime.sampling.params import SamplingParams

TOKENIZER = load_tokenizer("attar:tiny")
GRAMMARS = Grammars(TOKENIZER, len(TOKENIZER))
ID = 1234567890123456789
UINT64 = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}
NODE = {
    "type": "object",
    "properties": {"v": UINT64, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
}


def tagged(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}


CASES: list[tuple[Any, list[str], list[str]]] = [  # schema, texts that it allows, texts that it does not
    ({"enum": [ID, "a", {"k": ID}]}, [str(ID), '"a"', f'{{"k":{ID}}}'], [str(ID - 21), str(ID + 1), '"b"']),
    ({"const": 2**53 + 1}, [str(2**53 + 1)], [str(2**53), str(2**53 + 2)]),
    (UINT64, ["0", str(2**64 - 1)], ["-1", str(2**64), "-0", "01"]),
    (
        {"type": "integer", "exclusiveMinimum": 2**53, "exclusiveMaximum": 2**63},
        [str(2**53 + 1)],
        [str(2**53), str(2**63)],
    ),
    (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        ["5", "0", str(-(2**63))],
        [str(2**63), "1.0"],
    ),
    ({"type": ["integer", "null"], "maximum": 2**63 - 1}, ["null", "-5"], [str(2**63), "true"]),
    (
        {"type": "number", "minimum": -(2**63), "maximum": 2**63 - 1},
        ["1.5", "-0.5", "7"],
        [f"{2**63 - 1}.5", str(2**63)],
    ),
    (
        {"type": "object", "properties": {"id": UINT64, "name": {"type": "string"}}, "required": ["id"]},
        ['{"id":5}', '{"id": 5, "name": "a"}', f'{{"id":{2**64 - 1}}}'],
        ["{}", '{"name":"a"}', '{"id":5,"name":3}', f'{{"id":{2**64}}}', '{"name":"a","id":5}'],
    ),
    (
        {"properties": {"a": {}, "id": UINT64}},
        ["{}", '{"a":[1],"id":1}', '{"id":1}'],
        ['{"id":-1}', '{"id":1,}'],
    ),
    (
        {"type": "array", "items": UINT64, "minItems": 1, "maxItems": 2},
        ["[1]", "[1, 2]"],
        ["[]", "[1,2,3]", "[-1]"],
    ),
    (
        {
            "type": "object",
            "properties": {"title": {"type": "string", "title": "t"}, "default": {"const": {"title": 1}}},
        },
        ['{"title":"a","default":{"title":1}}'],
        ['{"title":1}', '{"default":{}}'],
    ),
    ({"type": "array", "items": UINT64}, ["[]", "[1,2,3]"], ["[-1]", "[1,]"]),
    ({"type": "object", "additionalProperties": UINT64}, ["{}", '{"x":1, "y\\n":2}'], ['{"x":-1}', "{1:1}"]),
    (
        {"type": "object", "properties": {"x": {"type": "string"}}, "additionalProperties": UINT64},
        ['{"x":"a","y":1}', '{"y":1}'],
        ['{"x":1}', '{"x":"a","x":1}'],
    ),
    (
        {"$ref": "#/$defs/n", "$defs": {"n": NODE}},
        ['{"v":1,"next":{"v":2,"next":null}}'],
        ['{"v":-1}', "null"],
    ),
    ({"anyOf": [{"const": ID}, {"type": "null"}]}, [str(ID), "null"], [str(ID + 1)]),
    ({"type": "integer", "default": ID, "examples": [ID]}, ["5", "-7"], ['"a"']),
    (
        {
            "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "$defs": {"a": tagged("a"), "b": tagged("b")},
        },
        ['{"kind":"a"}', '{"kind":"b"}'],
        ['{"kind":"c"}'],
    ),
    ({"type": "string", "minLength": 2, "maxLength": 2}, ['"😀é"', '"\\n\\n"'], ['"😀"', '"abc"']),
    ({"const": {"a": [1, None, '"\n<😀']}}, ['{"a": [1, null, "\\"\\n<😀"]}'], ['{"a":[1]}']),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, ["[1]"], ["[1,2]", '["a"]']),
    (
        {
            "type": "object",
            "patternProperties": {"^x": UINT64 | {"maximum": 9}},
            "additionalProperties": False,
        },
        ['{"x1":1}'],
        ['{"y":1}', '{"x":10}'],
    ),
    (
        {"type": "object", "properties": {"a": {"type": "integer"}}},
        ['{"a": 1}', '{"a":1}'],
        ['{"a":  1}', '{\n"a":1}'],
    ),
    (True, ["1", "[null]"], ["[1"]),
]
REFUSED = {
    "large bounds of multiples": (
        {"type": "integer", "multipleOf": 3, "maximum": 2**63 - 1},
        "beside multipleOf",
    ),
    "large in allOf": ({"allOf": [UINT64, {"minimum": 3}]}, "beside allOf"),
    "a small bound": ({"type": "integer", "minimum": 0.5, "maximum": 2**63}, "no integer"),
    "unique": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "conditions": ({"if": {"type": "string"}, "then": {"minLength": 2}}, '"if"'),
    "dependent": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "not": ({"not": {"type": "string"}}, '"not"'),
    "overlap": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    "large overlap": ({"oneOf": [UINT64, {"type": "number"}]}, "oneOf of schemas that may hold"),
    "nothing": ({"enum": []}, "empty"),
    "false": (False, "empty"),
    "an empty range": ({"type": "integer", "minimum": 2**63, "maximum": 2**60}, "no integer"),
    "a format": ({"type": "string", "format": "int64"}, "Unknown format"),
    "too deep": (json.loads('{"not":' * 900 + "{}" + "}" * 900), "nested too deeply|not"),
    "no target": ({"anyOf": [{"$ref": "#/$defs/none"}, {"const": ID}]}, "none"),
}


def allows(schema: Any, text: str) -> bool:
    matcher = GRAMMARS.matcher(SamplingParams(json_schema=json.dumps(schema)))
    assert matcher is not None
    for token in TOKENIZER(text, add_special_tokens=False)["input_ids"]:
        if not bool(matcher.allowed()[token]):
            return False
        matcher.consume(token)
    return matcher._mask.may_end


@pytest.mark.parametrize(("schema", "right", "wrong"), CASES, ids=lambda value: json.dumps(value)[:40])
def test_texts_of_a_schema(schema: Any, right: list[str], wrong: list[str]) -> None:
    assert {text: allows(schema, text) for text in right} == dict.fromkeys(right, True)
    assert {text: allows(schema, text) for text in wrong} == dict.fromkeys(wrong, False)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_in_a_line(name: str) -> None:
    schema, reason = REFUSED[name]
    with pytest.raises(SettingsError, match=reason) as caught:
        allows(schema, "1")
    assert caught.value.field == "json_schema" and "\n" not in str(caught.value)
