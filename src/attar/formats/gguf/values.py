"""Metadata values of a GGUF file: their types, and their bytes when written.

ggml, ``docs/gguf.md``. All numbers are little-endian.

    string   u64 length in bytes | UTF-8
    array    u32 type of the elements | u64 how many | elements; an element may be an array itself
    number   its bytes; bool is one byte, 0 or 1

A type is named as ggml names it: ``u8 i8 u16 i16 u32 i32 f32 bool str u64 i64 f64``; an array of a type T is
``[T]``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from attar.errors import ModelError

STRING, ARRAY = 8, 9
NUMBERS = {
    "u8": (0, "B"),
    "i8": (1, "b"),
    "u16": (2, "H"),
    "i16": (3, "h"),
    "u32": (4, "I"),
    "i32": (5, "i"),
    "f32": (6, "f"),
    "bool": (7, "?"),
    "u64": (10, "Q"),
    "i64": (11, "q"),
    "f64": (12, "d"),
}
"""Types of one number: their id in a file and their letter in :mod:`struct`."""

BY_ID = {number: (name, letter) for name, (number, letter) in NUMBERS.items()}
"""Name and letter by id."""

LONGEST_KEY = 65535
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class TypedValue:
    """A value with the type that it has in a file, where the width matters.

    Attributes:
        kind: such as ``"u64"``; for a list ``"[i32]"``, or the type of its elements alone: ``"i32"``.
        value: bool, int, float, str, or a list of them; bytes are a list of u8.
    """

    kind: str
    value: Any


MetadataValue = bool | int | float | str | bytes | list[Any] | TypedValue
"""A metadata value. Without a type an int is u32, below zero i32, beyond 32 bits u64 or i64; a float is f32;
a list has the type of its elements, an empty one that of strings."""


def value_kind(value: Any) -> str:
    """The type that a value is written in.

    Raises:
        ModelError: no type holds it, such as None.
    """
    if isinstance(value, TypedValue):
        bare = isinstance(value.value, list | tuple | bytes) and not value.kind.startswith("[")
        return f"[{value.kind}]" if bare else value.kind
    if isinstance(value, bytes):
        return "[u8]"
    if isinstance(value, list | tuple):
        return f"[{_common_kind(value)}]"
    if isinstance(value, str):
        return "str"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, Integral):
        return _integer_kind(int(value), int(value))
    if isinstance(value, Real):
        return "f32"
    raise ModelError(f"GGUF has no type for {value!r}")


def encode(key: str, value: MetadataValue) -> bytes:
    """A key and its value as they stand in a file.

    Raises:
        ModelError: the key is not plain ASCII, or the value does not fit its type; names the key.
    """
    if not key or not key.isascii() or len(key) > LONGEST_KEY:
        raise ModelError(f"{key!r} cannot be a key of GGUF metadata", hint="1 to 65535 ASCII characters")
    try:
        kind = value_kind(value)
        bare = value.value if isinstance(value, TypedValue) else value
        return string(key) + struct.pack("<I", _type_id(kind)) + _payload(kind, bare)
    except (struct.error, OverflowError, UnicodeEncodeError, TypeError, KeyError) as error:
        raise ModelError(f"metadata {key}: the value does not fit its type: {error}") from error
    except ModelError as error:
        raise ModelError(f"metadata {key}: {error.message}", hint=error.hint) from error


def string(text: str) -> bytes:
    """A string as it stands in a file."""
    raw = text.encode()
    return _LENGTH.pack(len(raw)) + raw


def _payload(kind: str, value: Any) -> bytes:
    """A value without its type."""
    if not kind.startswith("["):
        return string(value) if kind == "str" else struct.pack(f"<{NUMBERS[kind][1]}", value)
    inner = kind[1:-1]
    head = struct.pack("<IQ", _type_id(inner), len(value))
    if isinstance(value, bytes) and inner == "u8":
        return head + value
    if inner == "str":  # a vocabulary is 150,000 of them
        raws = [text.encode() for text in value]
        return head + b"".join(part for raw in raws for part in (_LENGTH.pack(len(raw)), raw))
    if inner in NUMBERS:
        return head + struct.pack(f"<{len(value)}{NUMBERS[inner][1]}", *value)
    return head + b"".join(_payload(inner, item) for item in value)


def _type_id(kind: str) -> int:
    if kind.startswith("["):
        return ARRAY
    return STRING if kind == "str" else NUMBERS[kind][0]


def _common_kind(values: Any) -> str:
    """The type of a list's elements: that of all, or the one that holds all numbers."""
    kinds = list(dict.fromkeys(value_kind(value) for value in values))
    if len(kinds) == 1:
        return kinds[0]
    if not kinds:
        return "str"
    if all(isinstance(value, Integral) and not isinstance(value, bool) for value in values):
        return _integer_kind(int(min(values)), int(max(values)))
    if all(isinstance(value, Real) and not isinstance(value, bool) for value in values):
        return "f32"
    raise ModelError(f"a list cannot hold {' and '.join(kinds)}")


def _integer_kind(low: int, high: int) -> str:
    """The type of whole numbers from low to high."""
    if low >= 0:
        return "u32" if high < 1 << 32 else "u64"
    return "i32" if low >= -(1 << 31) and high < 1 << 31 else "i64"
