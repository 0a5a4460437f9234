"""Reading a GGUF file: its metadata, and where each tensor's bytes are. writer.py has the layout.

Versions 2 and 3, little-endian, are read; version 1, with 32-bit counts, is not in use. Files are not mapped.
Tensors may have gaps between them, as ggml's ``docs/gguf.md`` allows, but no overlaps. Opening any part of a
split file opens all of them.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attar.checkpoint.tensors import TensorInfo, read_tensor
from attar.errors import CheckpointError
from attar.formats.gguf.types import TYPES, by_id
from attar.formats.gguf.values import HINT, LONGEST_KEY, Cursor, MetadataValue, TypedValue, read_value
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

__all__ = ["GGUF", "GGUFTensor", "GGUFTensorInfo", "GGUFWriter", "MetadataValue", "TypedValue", "read_gguf"]

MOST_ALIGNED = 1 << 20
SMALLEST_KEY, SMALLEST_INFO = 8 + 4 + 1, 8 + 4 + 4 + 8  # bytes of an entry with an empty name
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a file, known from its info.

    Attributes:
        kind: its ggml type, such as ``"Q4_K"``.
        shape: in torch's order: (N, K).
        offset: of its bytes in that file.
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


def read_gguf(path: str | Path) -> GGUF:
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
    base = path.with_name(name["stem"] + path.suffix)
    files = [part_name(base, index, count) for index in range(count)]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file}: is missing, one of {count} parts", hint="copy it too")
    return _joined([opened if file == path else _read_file(file) for file in files])


def _joined(parts: list[GGUF]) -> GGUF:
    """The parts of a model as one, after their split keys are checked."""
    tensors: dict[str, GGUFTensor] = {}
    for number, part in enumerate(parts):
        if len(parts) > 1:
            _check_part(part, number, len(parts), sum(len(file.tensors) for file in parts))
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
    """The value of a split key, a whole number."""
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
        kinds[key], metadata[key] = read_value(cursor, cursor.number("I", f"the type of {key}"), key, 0)
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
    for tensor in _with_file_offsets(cursor.path, cursor.size, list(tensors.values()), start, alignment):
        tensors[tensor.name] = tensor
    return GGUF((cursor.path,), version, metadata, kinds, tensors)


def _header(cursor: Cursor) -> tuple[int, int, int]:
    """Version, number of tensors, number of keys."""
    magic = cursor.read_bytes(4, "the header")
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


def _info(cursor: Cursor) -> GGUFTensor:
    """A tensor, its offset still counted from the start of the data."""
    name = cursor.string("a tensor's name", LONGEST_KEY)
    what = f"the info of tensor {name!r}"
    dimensions = cursor.number("I", what)
    if dimensions > DIMENSIONS:
        raise cursor.bad(f"tensor {name!r} has {dimensions} dimensions, more than {DIMENSIONS}")
    shape = struct.unpack(f"<{dimensions}Q", cursor.read_bytes(8 * dimensions, what))[::-1]
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


def _with_file_offsets(
    path: Path, size: int, tensors: list[GGUFTensor], start: int, alignment: int
) -> Iterator[GGUFTensor]:
    """The tensors with offsets from the start of the file, in the order of their bytes."""
    end, previous = 0, ""
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        what = f"{path}: tensor {tensor.name!r} at byte {start + tensor.offset}"
        if tensor.offset % alignment:
            raise CheckpointError(f"{what} is not aligned to {alignment} bytes", hint=HINT)
        if tensor.offset < end:
            raise CheckpointError(f"{what} overlaps tensor {previous!r}", hint=HINT)
        if start + tensor.offset + tensor.nbytes > size:
            raise CheckpointError(f"{what} has {tensor.nbytes} bytes, but the file ends at {size}", hint=HINT)
        end, previous = tensor.offset + tensor.nbytes, tensor.name
        yield replace(tensor, offset=start + tensor.offset)
