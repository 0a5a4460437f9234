"""Tensors in safetensors files: headers read and written, bytes read into fresh memory.

A file is ``uint64 length (little-endian) | JSON header of that length | tensor bytes``. The header maps a
name to ``{"dtype", "shape", "data_offsets": [begin, end]}``, offsets counted from the end of the header. A
file is accepted only if the tensors cover the bytes after the header exactly, without gap or overlap.

Source: the format description in the README of huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attar.checkpoint.jsonfile import parse_json
from attar.errors import CheckpointError, NumericsError

if TYPE_CHECKING:
    import torch

TORCH = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
"""The format's dtype names to torch's, without types below one byte: torch has no shape for them."""

_CHUNK = 1 << 24


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor, as its header describes it.

    Attributes:
        dtype: the format's name of its type, such as ``"BF16"``.
        nbytes: its size in bytes.
        block: ggml's name of its block type (``"Q4_K"``); empty for plain numbers.
        logical: shape of the weight that the blocks encode.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    offset: int
    block: str = ""
    logical: tuple[int, ...] = ()

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight: ``logical`` for blocks, ``shape`` otherwise."""
        return self.logical if self.block else self.shape


def stored_dtype(dtype: torch.dtype) -> str:
    """The format's name of a torch dtype, such as ``"BF16"``."""
    name = str(dtype).removeprefix("torch.")
    return next(stored for stored, known in TORCH.items() if known == name)


def read_tensor(info: TensorInfo) -> torch.Tensor:
    """Read a tensor's bytes into a new tensor on the CPU; no part of the file stays mapped.

    Raises:
        CheckpointError: the file ends too soon or cannot be read, or torch has no such dtype.
    """
    import torch

    assert sys.byteorder == "little", "safetensors are little-endian"
    if info.dtype not in TORCH:
        raise CheckpointError(f"{info.file}: tensor {info.name!r} is {info.dtype}, which torch cannot hold")
    tensor = torch.empty(info.shape, dtype=getattr(torch, TORCH[info.dtype]))
    if not info.nbytes:
        return tensor
    buffer = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
    done = 0
    try:
        with info.file.open("rb", buffering=0) as file:
            while done < info.nbytes:
                count = os.preadv(file.fileno(), [buffer[done:]], info.offset + done)
                if count == 0:
                    raise CheckpointError(
                        f"{info.file}: ends inside tensor {info.name!r}: {done} of {info.nbytes} bytes",
                        hint="the file changed while it was read",
                    )
                done += count
    except OSError as error:
        raise CheckpointError(f"{info.file}: cannot be read: {error.strerror}") from error
    return tensor


def check_finite(name: str, tensor: torch.Tensor, file: Path) -> None:
    """Refuse NaN and infinity, in chunks that need little additional memory.

    Raises:
        NumericsError: names the tensor and its file.
    """
    import torch

    if not tensor.is_floating_point() or not tensor.numel():
        return
    for chunk in tensor.detach().reshape(-1).split(_CHUNK):
        # aminmax propagates NaN; float8 has no such reduction
        extremes = (chunk.float() if chunk.element_size() == 1 else chunk).aminmax()
        if not all(bool(torch.isfinite(extreme)) for extreme in extremes):
            raise NumericsError(
                f"{file}: tensor {name!r} contains NaN or infinity",
                hint="the weights are damaged; get them again",
            )


MAX_HEADER = 100_000_000
"""Longest header in bytes; the reference implementation has the same limit."""

_DIMENSIONS = 64

BITS: dict[str, int] = {
    name: bits
    for bits, names in (
        (4, "F4"),
        (6, "F6_E2M3 F6_E3M2"),
        (8, "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E4M3FNUZ F8_E5M2FNUZ F8_E8M0"),
        (16, "U16 I16 F16 BF16"),
        (32, "U32 I32 F32"),
        (64, "U64 I64 F64 C64"),
    )
    for name in names.split()
}
"""Bits of one element, by the format's dtype name."""


class HeaderEntry(NamedTuple):
    """A tensor of a safetensors header; ``begin`` and ``end`` are byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor of this dtype (the format's name) and shape, rounded up."""
    return (math.prod(shape) * BITS[dtype] + 7) // 8


def read_header(path: Path) -> list[HeaderEntry]:
    """The tensors of a safetensors file in the order of their bytes. Reads the header only.

    Raises:
        CheckpointError: the file is missing, truncated or damaged.
    """
    raw, size = _raw_header(path)
    start = 8 + len(raw)
    entries = [_entry(path, name, field, start) for name, field in _fields(path, raw).items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    position = start
    for entry in entries:
        if entry.begin != position:
            raise _damaged(path, f"tensor {entry.name!r} begins at byte {entry.begin}, expected {position}")
        position = entry.end
    if position != size:
        problem = "truncated" if size < position else "damaged"
        raise CheckpointError(
            f"{path}: {problem}: the header describes {position} bytes, the file has {size}",
            hint="copy or download the file again",
        )
    return entries


def write_header(entries: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, list[HeaderEntry]]:
    """The header of a file with these (name, dtype, shape) in this order, and the entry of each tensor.

    The header is padded with spaces to a multiple of 8 bytes, so that tensors sorted by element size are
    aligned.
    """
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position, relative = 0, []
    for name, dtype, shape in entries:
        end = position + tensor_bytes(dtype, shape)
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        relative.append(HeaderEntry(name, dtype, tuple(shape), position, end))
        position = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, [
        entry._replace(begin=entry.begin + start, end=entry.end + start) for entry in relative
    ]


def _raw_header(path: Path) -> tuple[bytes, int]:
    """The header's JSON bytes and the size of the file."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise _damaged(path, f"truncated: {size} bytes, a safetensors file has at least 8")
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER:
                raise _damaged(path, f"not a safetensors file: it claims a header of {length} bytes")
            if 8 + length > size:
                raise _damaged(path, f"truncated: the header needs {8 + length} bytes, the file has {size}")
            return file.read(length), size
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _fields(path: Path, raw: bytes) -> dict[str, Any]:
    """The header's fields by tensor name; refuses duplicate names."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            raise _damaged(path, "the header names a tensor twice")
        return fields

    fields = parse_json(raw, f"{path}: header of {len(raw)} bytes", unique)
    if not isinstance(fields, dict):
        raise _damaged(path, "the header is not a JSON object")
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(path, "the header's __metadata__ is not a mapping of texts")
    return fields


def _entry(path: Path, name: str, field: Any, start: int) -> HeaderEntry:
    """A checked header entry, with offsets from the beginning of the file."""
    try:
        dtype, shape, (begin, end) = field["dtype"], field["shape"], field["data_offsets"]
        valid = all(type(number) is int and 0 <= number < 2**63 for number in (*shape, begin, end))
    except (TypeError, KeyError, ValueError) as error:
        raise _damaged(path, f"tensor {name!r} has no dtype, shape or data_offsets") from error
    if not isinstance(shape, list) or len(shape) > _DIMENSIONS or not valid:
        raise _damaged(path, f"tensor {name!r} has shape {shape} and offsets {begin}..{end}")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _damaged(path, f"tensor {name!r} has the unknown dtype {dtype!r}")
    expected = tensor_bytes(dtype, shape)
    if end - begin != expected:
        raise _damaged(
            path, f"tensor {name!r} ({dtype} {shape}) has {end - begin} bytes, expected {expected}"
        )
    return HeaderEntry(name, dtype, tuple(shape), begin + start, end + start)


def _damaged(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path}: {problem}", hint="copy or download the file again")
