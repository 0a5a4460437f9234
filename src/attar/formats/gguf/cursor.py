"""The head of a GGUF file, read from front to back: nothing is allocated before it is known to be there."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from attar.errors import CheckpointError

LARGEST = 64 << 20
"""Bytes of a string and elements of an array at most, as in ggml."""

HINT = "copy or download the file again"


class Cursor:
    """The head of a file, read from front to back and never beyond its end.

    Args:
        path: the file's, for messages.
        file: open, at its start.
        size: in bytes.
    """

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size, self.position = path, file, size, 0

    @property
    def left(self) -> int:
        """Bytes that follow."""
        return self.size - self.position

    def bad(self, what: str, hint: str = HINT) -> CheckpointError:
        """An error that names the file and the place."""
        return CheckpointError(f"{self.path}: {what} (header byte {self.position})", hint=hint)

    def expect(self, count: int, what: str) -> None:
        """Raise where fewer bytes follow."""
        if count > self.left:
            raise self.bad(f"ends inside {what}: {count} bytes wanted, {self.left} left")

    def take(self, count: int, what: str) -> bytes:
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
        return int(form.unpack(self.take(form.size, what))[0])

    def string(self, what: str, longest: int = LARGEST) -> str:
        """The next string."""
        length = self.number("Q", what)
        if length > longest:
            raise self.bad(f"{what} is {length} bytes long, more than {longest}")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise self.bad(f"{what} is not UTF-8") from error

    def strings(self, count: int, what: str) -> list[str]:
        """The next strings; a vocabulary is 150,000 of them, hence the short cut."""
        self.expect(8 * count, what)
        read, length = self.file.read, struct.Struct("<Q").unpack
        position, found = self.position, []
        try:
            for _ in range(count):
                (size,) = length(read(8))
                position += 8 + size
                if position > self.size or size > LARGEST:
                    raise self.bad(f"ends inside {what}, or a string of it is longer than {LARGEST} bytes")
                found.append(read(size).decode())
        except (UnicodeDecodeError, struct.error) as error:
            self.position = position
            raise self.bad(f"{what} holds a string that is not UTF-8, or ends inside it") from error
        self.position = position
        return found
