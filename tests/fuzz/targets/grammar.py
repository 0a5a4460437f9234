"""JSON schemas, regexes and Lark grammars: compiled, and followed for a few tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attar.errors import AttarError
from attar.runtime.sampling.grammar import Grammars
from attar.runtime.sampling.params import SamplingParams
from tests import tiny_models

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "minLength": 1, "maxLength": 5, "pattern": "^[a-z]+$"},
        "b": {"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 1, "maxItems": 3},
        "c": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 10}, {"enum": ["u", None, 3]}]},
    },
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"x": {"type": "object", "properties": {"y": {"$ref": "#/$defs/x"}}}},
}
REGEXES = ("[a-z]{1,9}(-[0-9]+)?", "(a|b)*c", r"\d{4}-\d{2}", "(.{1,5}){1,5}x")
LARKS = ('start: "a" start "b" | "c"', "start: WORD+\nWORD: /[a-z]+/", 'start: x\nx: "a" | x "b"')


def seeds(folder: Path) -> list[bytes]:
    """Each kind, as {kind: text}."""
    rows = [
        {"json_schema": SCHEMA},
        *({"regex": text} for text in REGEXES),
        *({"grammar": text} for text in LARKS),
    ]
    return [json.dumps(row).encode() for row in rows]


def target(folder: Path) -> Callable[[bytes], bool]:
    """Compiles the grammar and takes the first token allowed, eight times."""
    tokenizer = tiny_models.tokenizer()

    def handle(data: bytes) -> bool:
        guide = _guide(data)
        if guide is None:
            return False
        try:
            matcher = Grammars(tokenizer, tiny_models.VOCABULARY).matcher(SamplingParams(**guide))
            for _ in range(8):
                allowed = matcher.allowed((0,)).nonzero()
                if not len(allowed) or int(allowed[0]) == 0:
                    break
                matcher.consume(int(allowed[0]))
            return True
        except AttarError:
            return False

    return handle


def _guide(data: bytes) -> dict[str, str] | None:
    """The parameters that an input stands for; None where it is of another form."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return {"regex": data.decode("utf-8", "replace")}
    if not isinstance(document, dict) or len(document) != 1:
        return None
    ((name, value),) = document.items()
    if name == "json_schema":
        return {name: json.dumps(value)}
    return {name: value} if name in ("regex", "grammar") and isinstance(value, str) else None
