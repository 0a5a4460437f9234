"""Mutations that keep an input's outer form, so that a parser is tried beyond its first check.

JSON: one node of the document is replaced, removed, doubled or nested. Text: a line or a token is
replaced, doubled or removed. Bytes: bits flipped, stretches cut or repeated, extreme integers.

Every function takes and returns bytes and is a pure function of its input and the random generator.
"""

from __future__ import annotations

import json
import random
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 2**64, 10**30, 0.0, -0.0, 1e-300, 1e308, 0.5,
    "", " ", "a", "\x00", "\ud800", "é", "🦊" * 3, "../../etc/passwd", "http://x/", "{}", "a" * 5000, "-1",
    [], {}, [[]], [None], [{}], {"": ""}, {"a": {"a": {}}}, [1, 2, 3], [1e400], ["a", 1],
)  # fmt: skip
INTEGERS = (b"\x00" * 8, b"\xff" * 8, b"\x00" * 7 + b"\x80", b"\xff" * 7 + b"\x7f", b"\x00\x00\x00\x40" * 2)
TOKENS = (
    "null", "true", "[]", "{}", "''", "-1", "1e309", "0.0", "999999999999", "*a", "&a", "!!python/object:os",
    "- ", ": ", "? ", "|", ">", "---", "...", "#", "\t", "\u2028", "\ufeff", "%YAML 1.1", "<<: *a", "[" * 40,
)  # fmt: skip


def mutate(kind: str, data: bytes, rng: random.Random) -> bytes:
    """One mutation of an input of a kind: ``json``, ``text`` or ``bytes``."""
    if kind == "json" and rng.random() < 0.9:
        try:
            return mutate_json(data, rng)
        except (ValueError, RecursionError):
            pass
    if kind == "text" and rng.random() < 0.9:
        return mutate_text(data, rng)
    return mutate_bytes(data, rng)


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """A document with one node changed. Raises ValueError where the input is no JSON."""
    document = json.loads(data)
    paths = list(_paths(document))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        document = _changed(document, rng.choice(paths), rng)
    return json.dumps(document, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")


def mutate_text(data: bytes, rng: random.Random) -> bytes:
    """A text with one line doubled, removed, indented, or with a token put in or exchanged."""
    lines = data.decode("utf-8", "replace").split("\n")
    at = rng.randrange(len(lines))
    action = rng.randrange(6)
    if action == 0:
        lines.insert(at, rng.choice(lines))
    elif action == 1 and len(lines) > 1:
        del lines[at]
    elif action == 2:
        lines[at] = " " * rng.randrange(6) + lines[at].lstrip()
    elif action == 3:
        key, colon, _ = lines[at].partition(":")
        lines[at] = f"{key}{colon} {rng.choice(TOKENS)}" if colon else rng.choice(TOKENS)
    elif action == 4:
        lines[at] += str(rng.choice(VALUES))[:200]
    else:
        position = rng.randrange(len(lines[at]) + 1)
        lines[at] = lines[at][:position] + rng.choice(TOKENS) + lines[at][position:]
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """A bit flipped, an extreme integer written, or a stretch cut, repeated or moved."""
    raw = bytearray(data or b"\x00")
    at = rng.randrange(len(raw))
    length = rng.choice((1, 2, 4, 8, 64))
    action = rng.randrange(5)
    if action == 0:
        raw[at] ^= 1 << rng.randrange(8)
    elif action == 1:
        raw[at : at + length] = rng.choice(INTEGERS)[:length]
    elif action == 2:
        del raw[at : at + length]
    elif action == 3:
        raw[at:at] = raw[at : at + length] * rng.choice((1, 2, 100))
    else:
        raw[at : at + length] = rng.randbytes(length)
    return bytes(raw)


def _paths(document: Any, prefix: tuple[Any, ...] = ()) -> Any:
    """The path of every node, the root first."""
    yield prefix
    children = (
        document.items() if isinstance(document, dict) else enumerate(document) if _list(document) else ()
    )
    for key, child in children:
        yield from _paths(child, (*prefix, key))


def _list(value: Any) -> bool:
    return isinstance(value, list)


def _changed(document: Any, path: tuple[Any, ...], rng: random.Random) -> Any:
    """The document with the node at a path changed; unchanged where an earlier change removed the path."""
    if not path:
        return _other(document, rng)
    key, *rest = path
    if isinstance(document, dict) and key in document:
        if not rest and rng.random() < 0.15:
            return {name: value for name, value in document.items() if name != key}
        return document | {key: _changed(document[key], tuple(rest), rng)}
    if _list(document) and isinstance(key, int) and key < len(document):
        if not rest and rng.random() < 0.15:
            return document[:key] + document[key + 1 :]
        return [*document[:key], _changed(document[key], tuple(rest), rng), *document[key + 1 :]]
    return document


def _other(value: Any, rng: random.Random) -> Any:
    """A value in place of another: an odd one, a nearby one, or the old one nested or repeated."""
    action = rng.randrange(6)
    if action == 0:
        return [value]
    if action == 1:
        return [value] * rng.choice((2, 50))
    if action == 2 and isinstance(value, int | float) and not isinstance(value, bool):
        return value * rng.choice((-1, 2, 1000)) + rng.choice((-1, 0, 1))
    if action == 3 and isinstance(value, str):
        return value[: rng.randrange(len(value) + 1)] + rng.choice(("", "\x00", "<|x|>", "é", "/", " "))
    if action == 4 and isinstance(value, dict):
        return value | {rng.choice(("", "a", "type", "$ref", "name")): rng.choice(VALUES)}
    return rng.choice(VALUES)
