"""Metadata values of a GGUF file: their types, how they are written, and how a header is read.

ggml, ``docs/gguf.md``. All numbers are little-endian.

    string   u64 length in bytes | UTF-8
    array    u32 type of the elements | u64 how many | elements; an element may be an array itself
    number   its bytes; bool is one byte, 0 or 1

Types have ggml's names: ``u8 i8 u16 i16 u32 i32 f32 bool str u64 i64 f64``; an array of type T is ``[T]``.
Before a length that a file states is allocated, it is compared with the bytes that are left.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, BinaryIO

from attar.errors import CheckpointError, ModelError

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
LARGEST = 64 << 20
"""Bytes of a string and elements of an array at most, as in ggml."""
DEEPEST = 4  # arrays in arrays
BYTES = 1024  # longer arrays of u8 stay bytes
HINT = "copy or download the file again"
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
a list has the type of its elements, an empty list the type of strings."""


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
    """The common type of a list's elements, or the type that holds all numbers."""
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


class Cursor:
    """The header of a file, read from front to back and never beyond its end.

    Args:
        size: in bytes.
    """

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size, self.position = path, file, size, 0

    @property
    def left(self) -> int:
        """Bytes that follow."""
        return self.size - self.position

    def bad(self, what: str, hint: str = HINT) -> CheckpointError:
        """An error that names the file and the position."""
        return CheckpointError(f"{self.path}: {what} (header byte {self.position})", hint=hint)

    def expect(self, count: int, what: str) -> None:
        """Raise where fewer bytes follow."""
        if count > self.left:
            raise self.bad(f"ends inside {what}: {count} bytes wanted, {self.left} left")

    def read_bytes(self, count: int, what: str) -> bytes:
        """The next bytes."""
        self.expect(count, what)
        raw = self.file.read(count)
        if len(raw) != count:
            raise self.bad(f"ends inside {what}: the file changed while it was read")
        self.position += count
        return raw

    def number(self, letter: str, what: str) -> int:
        """The next number."""
        form = struct.Struct(f"<{letter}")
        return int(form.unpack(self.read_bytes(form.size, what))[0])

    def string(self, what: str, longest: int = LARGEST) -> str:
        """The next string."""
        length = self.number("Q", what)
        if length > longest:
            raise self.bad(f"{what} is {length} bytes long, more than {longest}")
        try:
            return self.read_bytes(length, what).decode()
        except UnicodeDecodeError as error:
            raise self.bad(f"{what} is not UTF-8") from error

    def strings(self, count: int, what: str) -> list[str]:
        """The next strings, read without :meth:`string`: a vocabulary has 150,000."""
        self.expect(8 * count, what)
        read, length = self.file.read, struct.Struct("<Q").unpack
        position, strings = self.position, []
        try:
            for _ in range(count):
                (size,) = length(read(8))
                position += 8 + size
                if position > self.size or size > LARGEST:
                    raise self.bad(f"ends inside {what}, or a string of it is longer than {LARGEST} bytes")
                strings.append(read(size).decode())
        except (UnicodeDecodeError, struct.error) as error:
            self.position = position
            raise self.bad(f"{what} holds a string that is not UTF-8, or ends inside it") from error
        self.position = position
        return strings


def read_value(cursor: Cursor, number: int, key: str, depth: int) -> tuple[str, Any]:
    """Type and value of a key."""
    what = f"the value of {key}"
    if number == STRING:
        return "str", cursor.string(what)
    if number == ARRAY:
        return _array(cursor, key, depth)
    if number not in BY_ID:
        raise cursor.bad(f"{what} has the unknown type {number}")
    name, letter = BY_ID[number]
    return name, _numbers(cursor, letter, 1, what)[0]


def _array(cursor: Cursor, key: str, depth: int) -> tuple[str, Sequence[Any]]:
    what = f"the value of {key}"
    inner, length = cursor.number("I", what), cursor.number("Q", what)
    if length > LARGEST:
        raise cursor.bad(f"{what} has {length} elements, more than {LARGEST}")
    if inner in BY_ID:
        name, letter = BY_ID[inner]
        return f"[{name}]", _numbers(cursor, letter, length, what)
    if inner == STRING:
        return "[str]", cursor.strings(length, what)
    if inner != ARRAY or depth + 1 >= DEEPEST:
        raise cursor.bad(f"{what} has elements of the type {inner}, unknown or too deep")
    cursor.expect(length * 12, what)
    items = [_array(cursor, key, depth + 1) for _ in range(length)]
    kinds = list(dict.fromkeys(kind for kind, _ in items)) or ["[str]"]
    if len(kinds) > 1:
        raise cursor.bad(f"{what} mixes {' and '.join(kinds)}")
    return f"[{kinds[0]}]", [value for _, value in items]


def _numbers(cursor: Cursor, letter: str, length: int, what: str) -> Sequence[Any]:
    """Numbers of one type. Many of u8 stay bytes, which take a 17th of a list's memory."""
    raw = cursor.read_bytes(length * struct.calcsize(f"<{letter}"), what)
    if letter == "B" and length > BYTES:
        return raw
    if letter == "?" and max(raw, default=0) > 1:
        raise cursor.bad(f"{what} holds a bool that is neither 0 nor 1")
    return list(struct.unpack(f"<{length}{letter}", raw))
