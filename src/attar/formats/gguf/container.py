"""Reading a GGUF file: its metadata, and where each tensor's bytes are. writer.py tells the layout.

Read are versions 2 and 3, little-endian; version 1 counted with 32 bits and is nobody's any more. Nothing is
mapped, and nothing is believed: before a length is allocated it is compared with what is left of the file.
Tensors may have gaps between them, as ggml's ``docs/gguf.md`` allows, but no overlaps. Opening any part of a
split file opens all of them.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attar.checkpoint.tensors import TensorInfo, read_tensor
from attar.errors import CheckpointError
from attar.formats.gguf.cursor import HINT, LARGEST, Cursor
from attar.formats.gguf.types import TYPES, by_id
from attar.formats.gguf.values import ARRAY, BY_ID, LONGEST_KEY, STRING, MetadataValue, TypedValue
from attar.formats.gguf.writer import (
    ALIGNMENT,
    DIMENSIONS,
    MAGIC,
    SPLIT,
    VERSION,
    GGUFTensorInfo,
    GGUFWriter,
    part_name,
    stored_form,
)

if TYPE_CHECKING:
    import torch

__all__ = ["GGUF", "GGUFTensor", "GGUFTensorInfo", "GGUFWriter", "MetadataValue", "TypedValue", "read"]

DEEPEST = 4  # arrays in arrays
MOST_ALIGNED = 1 << 20
BYTES = 1024  # numbers of u8 beyond which an array stays bytes: a table, which says nothing of single blocks
SMALLEST_KEY, SMALLEST_INFO = 8 + 4 + 1, 8 + 4 + 4 + 8  # bytes of an entry with an empty name
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a file, known from its info.

    Attributes:
        name: its name.
        kind: its ggml type, such as ``"Q4_K"``.
        shape: torch's way round: (N, K).
        file: the file that holds it.
        offset: where its bytes begin in that file.
        nbytes: how many there are.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    @property
    def info(self) -> TensorInfo:
        """The same as a stored tensor: uint8 (..., row_bytes) for block types, numbers otherwise."""
        dtype, shape = stored_form(GGUFTensorInfo(self.name, self.kind, self.shape))
        block = self.kind if TYPES[self.kind].block > 1 else ""
        return TensorInfo(self.name, dtype, shape, self.nbytes, self.file, self.offset, block, self.shape)


@dataclass(frozen=True)
class GGUF:
    """An opened GGUF file, all its parts together.

    Attributes:
        files: the file, or its parts in their order.
        version: of the format.
        metadata: values by key, in the file's order; the keys of a split are left out. An array is a list,
            a long one of u8 is bytes.
        kinds: the type of each value: ``"u32"``, ``"[str]"``.
        tensors: by name, in the file's order.
    """

    files: tuple[Path, ...]
    version: int
    metadata: dict[str, Any]
    kinds: dict[str, str]
    tensors: dict[str, GGUFTensor]

    def load(self, name: str) -> torch.Tensor:
        """A tensor as it is stored: uint8 (..., row_bytes) for block types, numbers otherwise.

        Raises:
            CheckpointError: there is no such tensor, or the file has changed meanwhile.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.files[0]}: no tensor {name!r}")
        return read_tensor(self.tensors[name].info)

    def typed(self) -> dict[str, MetadataValue]:
        """The metadata with its types, as a writer takes it."""
        return {key: TypedValue(self.kinds[key], value) for key, value in self.metadata.items()}


def read(path: str | Path) -> GGUF:
    """Open a GGUF file, with all its parts where it is one of several. Reads no tensor.

    Raises:
        CheckpointError: the file or a part is missing, truncated or damaged; names the file, what is wrong
            and where.
    """
    path = Path(path)
    opened = _read_file(path)
    count = _split(opened, "split.count", 0)
    if count <= 1:
        return _joined([opened])
    name = _PART.fullmatch(path.stem)
    number = _split(opened, "split.no", None)
    if name is None or (int(name["number"]), int(name["count"])) != (number + 1, count):
        raise CheckpointError(
            f"{path}: is part {number + 1} of {count} by its split.no and split.count",
            hint=f"give it back its name: ...-{number + 1:05d}-of-{count:05d}.gguf",
        )
    whole = path.with_name(name["stem"] + path.suffix)
    files = [part_name(whole, index, count) for index in range(count)]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file}: is missing, one of {count} parts", hint="copy it too")
    return _joined([opened if file == path else _read_file(file) for file in files])


def _joined(parts: list[GGUF]) -> GGUF:
    """The parts of a model as one, after a look at what they say of each other."""
    tensors: dict[str, GGUFTensor] = {}
    for number, part in enumerate(parts):
        if len(parts) > 1:
            _check_part(part, number, len(parts), sum(len(each.tensors) for each in parts))
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{tensor.file}: tensor {name!r} is also in {tensors[name].file.name}")
            tensors[name] = tensor
    first = parts[0]
    keys = [key for key in first.metadata if key not in SPLIT]
    return GGUF(
        files=tuple(part.files[0] for part in parts),
        version=first.version,
        metadata={key: first.metadata[key] for key in keys},
        kinds={key: first.kinds[key] for key in keys},
        tensors=tensors,
    )


def _check_part(part: GGUF, number: int, count: int, tensors: int) -> None:
    for key, wanted in zip(SPLIT, (number, count, tensors), strict=True):
        if _split(part, key, None) != wanted:
            raise CheckpointError(
                f"{part.files[0]}: {key} is {part.metadata.get(key)}, but the {count} parts make it {wanted}",
                hint="the parts are of different models; copy them again",
            )


def _split(part: GGUF, key: str, default: int | None) -> int:
    """A whole number that tells of a split."""
    value = part.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"{part.files[0]}: {key} is {value!r}, not a whole number", hint=HINT)
    return value


def _read_file(path: Path) -> GGUF:
    """One file, with the keys of a split."""
    try:
        with path.open("rb") as file:
            return _parse(Cursor(path, file, path.stat().st_size))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file", hint="give the path of a .gguf file") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _parse(cursor: Cursor) -> GGUF:
    version, tensor_count, key_count = _header(cursor)
    metadata: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    for _ in range(key_count):
        key = cursor.string("a key", LONGEST_KEY)
        if key in metadata or not key.isascii() or not key:
            raise cursor.bad(f"key {key!r} {'stands twice' if key in metadata else 'is not ASCII'}")
        kinds[key], metadata[key] = _value(cursor, cursor.number("I", f"the type of {key}"), key, 0)
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= MOST_ALIGNED or alignment % 8:
        raise cursor.bad(f"general.alignment is {alignment!r}, not a multiple of 8 up to {MOST_ALIGNED}")
    tensors: dict[str, GGUFTensor] = {}
    for _ in range(tensor_count):
        tensor = _info(cursor)
        if tensor.name in tensors:
            raise cursor.bad(f"tensor {tensor.name!r} stands twice")
        tensors[tensor.name] = tensor
    start = -(-cursor.position // alignment) * alignment
    placed = {
        tensor.name: tensor
        for tensor in _placed(cursor.path, cursor.size, list(tensors.values()), start, alignment)
    }
    return GGUF((cursor.path,), version, metadata, kinds, {name: placed[name] for name in tensors})


def _header(cursor: Cursor) -> tuple[int, int, int]:
    """Version, number of tensors, number of keys."""
    magic = cursor.take(4, "the header")
    if magic != MAGIC:
        raise cursor.bad(f"begins with {magic!r}, not {MAGIC!r}", hint="this is no GGUF file")
    version = cursor.number("I", "the header")
    if version not in (2, VERSION):
        foreign = version & 0xFFFF == 0 and version
        why = "big-endian" if foreign else f"of version {version}; attar reads 2 and {VERSION}"
        raise cursor.bad(f"the file is {why}", hint="convert the model again, with a recent llama.cpp")
    tensors, keys = cursor.number("Q", "the header"), cursor.number("Q", "the header")
    if tensors * SMALLEST_INFO + keys * SMALLEST_KEY > cursor.left:
        raise cursor.bad(
            f"{tensors} tensors and {keys} keys do not fit into the {cursor.left} bytes that follow"
        )
    return version, tensors, keys


def _value(cursor: Cursor, number: int, key: str, depth: int) -> tuple[str, Any]:
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
    items = []
    for _ in range(length):
        items.append(_array(cursor, key, depth + 1))
    kinds = list(dict.fromkeys(kind for kind, _ in items)) or ["[str]"]
    if len(kinds) > 1:
        raise cursor.bad(f"{what} mixes {' and '.join(kinds)}")
    return f"[{kinds[0]}]", [value for _, value in items]


def _numbers(cursor: Cursor, letter: str, length: int, what: str) -> Sequence[Any]:
    """Numbers of one type; many of u8 stay the bytes they are, which take a 17th of a list's memory."""
    raw = cursor.take(length * struct.calcsize(f"<{letter}"), what)
    if letter == "B" and length > BYTES:
        return raw
    if letter == "?" and max(raw, default=0) > 1:
        raise cursor.bad(f"{what} holds a bool that is neither 0 nor 1")
    return list(struct.unpack(f"<{length}{letter}", raw))


def _info(cursor: Cursor) -> GGUFTensor:
    """A tensor, its offset still counted from the start of the data."""
    name = cursor.string("a tensor's name", LONGEST_KEY)
    what = f"the info of tensor {name!r}"
    dimensions = cursor.number("I", what)
    if dimensions > DIMENSIONS:
        raise cursor.bad(f"tensor {name!r} has {dimensions} dimensions, more than {DIMENSIONS}")
    shape = struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions, what))[::-1]
    number, offset = cursor.number("I", what), cursor.number("Q", what)
    try:
        kind = by_id(number)
    except CheckpointError as error:
        raise cursor.bad(f"tensor {name!r}: {error.message}", hint=error.hint or HINT) from error
    columns = shape[-1] if shape else 1
    if 0 in shape or columns % kind.block:
        raise cursor.bad(f"tensor {name!r} is {list(shape)} in {kind.name}, whose blocks hold {kind.block}")
    nbytes = math.prod(shape) // kind.block * kind.size
    return GGUFTensor(name, kind.name, shape, cursor.path, offset, nbytes)


def _placed(
    path: Path, size: int, tensors: list[GGUFTensor], start: int, alignment: int
) -> Iterator[GGUFTensor]:
    """The tensors with their places in the file, in the order of their bytes."""
    end, before = 0, ""
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        what = f"{path}: tensor {tensor.name!r} at byte {start + tensor.offset}"
        if tensor.offset % alignment:
            raise CheckpointError(f"{what} is not aligned to {alignment} bytes", hint=HINT)
        if tensor.offset < end:
            raise CheckpointError(f"{what} overlaps tensor {before!r}", hint=HINT)
        if start + tensor.offset + tensor.nbytes > size:
            raise CheckpointError(f"{what} has {tensor.nbytes} bytes, but the file ends at {size}", hint=HINT)
        end, before = tensor.offset + tensor.nbytes, tensor.name
        yield replace(tensor, offset=start + tensor.offset)
