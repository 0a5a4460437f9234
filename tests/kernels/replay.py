"""Calls of a compiled library written to a file, memory and all, and run by replay.cpp: on this processor or,
by qemu, on another one. Both have 64-bit words, the low byte first, and lay structures out alike.

    regions     n, then of each its size and its bytes
    pointers    n, then of each: region, offset where it stands, region, offset where it points
    calls       n, then of each: name, whether its result must be 0, 13 arguments (kind, value, region)
    results     n, then of each the region that is wanted
"""

from __future__ import annotations

import bisect
import ctypes
import dataclasses
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

SOURCE = Path(__file__).with_name("replay.cpp")
ARGUMENTS = 13


@dataclasses.dataclass(frozen=True)
class Result:
    """What an earlier call returned."""

    index: int


class Recording:
    """Calls, and the memory that they work on."""

    def __init__(self) -> None:
        self._kept: list[Any] = []  # so that no address is used twice
        self._regions: list[tuple[int, int]] = []  # address, bytes
        self._structures: list[tuple[int, Any]] = []
        self._calls: list[tuple[str, bool, tuple[Any, ...]]] = []
        self._wanted: list[Any] = []

    def keep(self, value: Any) -> None:
        """What pointers point to: tensors, arrays, structures, and lists, dicts and dataclasses of them."""
        if isinstance(value, (torch.Tensor, np.ndarray, ctypes.Structure, ctypes.Array)):
            self._kept.append(value)
            self._regions.append((address(value), nbytes(value)))
            if isinstance(value, (ctypes.Structure, ctypes.Array)):
                self._structures.append((address(value), value))
        elif isinstance(value, dict):
            self.keep(list(value.values()))
        elif isinstance(value, (list, tuple)):
            for field in value:
                self.keep(field)
        elif dataclasses.is_dataclass(value):
            self.keep([getattr(value, field.name) for field in dataclasses.fields(value)])

    def call(self, name: str, *arguments: Any, checked: bool = True) -> Result:
        """A call: of numbers, of None, of what is kept (its address), and of results."""
        self._calls.append((name, checked, arguments))
        return Result(len(self._calls) - 1)

    def want(self, *values: Any) -> None:
        """What is to come back, as the last call leaves it."""
        self._wanted += values

    def write(self, path: Path) -> None:
        """The file."""
        self._regions = sorted(set(self._regions))
        with path.open("wb") as file:
            file.write(struct.pack("<q", len(self._regions)))
            for start, size in self._regions:
                file.write(struct.pack("<q", size) + ctypes.string_at(start, size))
            pointers = [
                pointer for start, value in self._structures for pointer in self._pointers(start, value)
            ]
            file.write(struct.pack("<q", len(pointers)))
            file.writelines(struct.pack("<4q", *pointer) for pointer in pointers)
            file.write(struct.pack("<q", len(self._calls)))
            for name, checked, arguments in self._calls:
                file.write(struct.pack("<q", len(name)) + name.encode() + struct.pack("<q", checked))
                padded = (*arguments, *[0] * (ARGUMENTS - len(arguments)))
                file.writelines(struct.pack("<3q", *self._argument(item)) for item in padded)
            positions = [self._place(address(value))[0] for value in self._wanted]
            file.write(struct.pack(f"<{len(positions) + 1}q", len(positions), *positions))

    def read(self, path: Path) -> list[torch.Tensor]:
        """What was wanted, of the same types and shapes."""
        data, at, actual = path.read_bytes(), 0, []
        for value in self._wanted:
            part = torch.frombuffer(bytearray(data[at : at + nbytes(value)]), dtype=value.dtype)
            actual.append(part.view(value.shape))
            at += nbytes(value)
        assert at == len(data)
        return actual

    def run(self, library: Path, driver: Path, room: Path, *before: str) -> list[torch.Tensor]:
        """The results of a library; ``before``: what runs the driver.

        Raises:
            AssertionError: a call failed.
        """
        recording, results = room / "recording", room / "results"
        self.write(recording)
        command = [*before, str(driver), str(library), str(recording), str(results)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
        return self.read(results)

    def _pointers(self, start: int, value: Any) -> Iterator[tuple[int, int, int, int]]:
        for at in _fields(type(value)):
            (target,) = struct.unpack("<q", ctypes.string_at(start + at, 8))
            if target:
                yield (*self._place(start + at), *self._place(target))

    def _place(self, target: int) -> tuple[int, int]:
        """Region and offset."""
        index = bisect.bisect(self._regions, (target, 1 << 62)) - 1
        start, size = self._regions[index]
        inside = index >= 0 and start <= target <= start + size  # an empty array may begin where others end
        assert inside, "a pointer to what is not kept"
        return index, target - start

    def _argument(self, value: Any) -> tuple[int, int, int]:
        if value is None or isinstance(value, int):
            return 0, int(value or 0), 0
        if isinstance(value, Result):
            return 2, value.index, 0
        region, offset = self._place(address(value))
        return 1, offset, region


def address(value: Any) -> int:
    """Where it lies."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return value.ctypes.data if isinstance(value, np.ndarray) else ctypes.addressof(value)


def nbytes(value: Any) -> int:
    """Its bytes."""
    return value.nbytes if isinstance(value, (torch.Tensor, np.ndarray)) else ctypes.sizeof(value)


def _fields(kind: Any, at: int = 0) -> Iterator[int]:
    """Offsets of the pointers of a structure, or of an array of structures."""
    if issubclass(kind, ctypes.Array):
        for index in range(kind._length_):
            yield from _fields(kind._type_, at + index * ctypes.sizeof(kind._type_))
    elif issubclass(kind, ctypes.Structure):
        for name, item in kind._fields_:
            yield from _fields(item, at + getattr(kind, name).offset)
    elif kind is ctypes.c_void_p:
        yield at


def compiled(compiler: str, flags: Sequence[str], source: Path, path: Path, *more: str) -> Path:
    """A program or a library."""
    subprocess.run([compiler, *flags, "-o", str(path), str(source), *more], check=True)
    return path
