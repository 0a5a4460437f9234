"""JSON schemas, and a check of values against the keywords that they use."""

from __future__ import annotations

import re
from typing import Any

SCHEMAS: dict[str, dict[str, Any]] = {
    "any object": {"type": "object"},
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b", 3]}, "maxItems": 3},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "choice": {
        "anyOf": [{"type": "boolean"}, {"const": "none"}, {"type": "number", "minimum": 1, "maximum": 2}]
    },
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}[0-9]+$", "maxLength": 6},
    "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
}
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def follows(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> None:
    """Raises AssertionError where a value is not one that the schema allows."""
    if "$ref" in schema:
        follows(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        assert any(_fits(value, entry, root) for entry in schema["anyOf"]), value
    assert "const" not in schema or value == schema["const"]
    assert "enum" not in schema or value in schema["enum"]
    kind = schema.get("type")
    if kind in TYPES:
        assert isinstance(value, TYPES[kind]), value
    elif kind is not None:
        assert isinstance(value, int if kind == "integer" else int | float) and not isinstance(value, bool)
    if "minimum" in schema:
        assert schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        assert len(value) <= schema.get("maxLength", len(value)) and re.search(
            schema.get("pattern", ""), value
        )
    if kind == "array":
        assert schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        for item in value:
            follows(item, schema["items"], root)
    if kind == "object":
        assert all(name in value for name in schema.get("required", ()))
        known = schema.get("properties", {})
        assert schema.get("additionalProperties", True) or all(name in known for name in value)
        for name, item in value.items():
            follows(item, known.get(name, {}), root)


def _fits(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    try:
        follows(value, schema, root)
    except (AssertionError, TypeError):
        return False
    return True
