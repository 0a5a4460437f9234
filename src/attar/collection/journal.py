"""The journal: an append-only JSONL file of answers, keyed by the hash of the request.

A line is one answer, flushed to the disk before the next request takes its worker, so a killed run loses only
the answers on their way. A half-written last line (a kill, a full disk) is cut off when the file is opened
again. A lock keeps a second writer out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attar.checkpoint.atomic import explain_os_errors, open_own, try_lock
from attar.errors import DataError, OutputError

SUFFIX = ".journal"
_BEGIN = b'{"messages": ['


class Journal:
    """The answers so far: which requests have one, and their rows.

    Args:
        path: the file; it need not exist.
        descriptor: of the open and locked file, for a journal that is written; None: read only.

    Raises:
        DataError: a line is no answer, and not the last one, half-written.
    """

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        self.path = path
        self._descriptor = descriptor
        self._lines: dict[str, tuple[int, int]] = {}  # id to offset and length
        self._end = 0
        data = path.read_bytes() if descriptor is None and path.exists() else _content(descriptor)
        for number, line in enumerate(data.splitlines(keepends=True), start=1):
            last = self._end + len(line) == len(data)
            row = _parsed(line)
            if row is None and last and _is_begun(line):
                break
            if row is None:
                raise DataError(
                    f"{path}:{number}: not an answer of attar collect",
                    hint="delete the line, which is asked again; or move the file away, if it is another one",
                )
            self._lines.setdefault(row["id"], (self._end, len(line)))
            self._end += len(line)
        self._ended = data[: self._end].endswith(b"\n") or not self._end

    def __contains__(self, id: str) -> bool:
        return id in self._lines

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, id: str) -> dict[str, Any]:
        """The row of an answer, read from the file."""
        offset, length = self._lines[id]
        if self._descriptor is not None:
            line = os.pread(self._descriptor, length, offset)
        else:
            with self.path.open("rb") as file:
                file.seek(offset)
                line = file.read(length)
        row: dict[str, Any] = json.loads(line)
        return row

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every row, in the order of arrival."""
        for id in self._lines:
            yield self.row(id)

    def repair(self) -> None:
        """Cut off a half-written last line; end a whole one."""
        assert self._descriptor is not None
        os.ftruncate(self._descriptor, self._end)
        if not self._ended:
            os.pwrite(self._descriptor, b"\n", self._end)
            self._end, self._ended = self._end + 1, True

    def append(self, row: dict[str, Any]) -> None:
        """Write a row to the disk; afterwards it survives a kill and a power cut.

        Raises:
            OutputError: the disk is full.
        """
        assert self._descriptor is not None and row["id"] not in self._lines
        line = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()
        with explain_os_errors(self.path, len(line)):
            try:
                written = 0
                while written < len(line):
                    written += os.pwrite(self._descriptor, line[written:], self._end + written)
                os.fsync(self._descriptor)
            except OSError:
                os.ftruncate(self._descriptor, self._end)
                raise
        self._lines[row["id"]] = (self._end, len(line))
        self._end += len(line)


@contextmanager
def open_journal(path: Path) -> Iterator[Journal]:
    """A journal to write to, locked and repaired; an empty one leaves no file.

    Raises:
        OutputError: another process writes to it, it is a link, or the folder cannot be written.
        DataError: it is damaged.
    """
    with open_own(path) as file:
        _lock(file.fileno(), path)
        journal = Journal(path, file.fileno())
        journal.repair()
        try:
            yield journal
        finally:
            if not journal:
                path.unlink(missing_ok=True)


def _lock(descriptor: int, path: Path) -> None:
    try:  # the holder of the lock may have removed an empty file in between
        locked = try_lock(descriptor) and os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        locked = False
    if not locked:
        raise OutputError(
            f"{path}: another process collects into it", hint="wait for it, or choose another -o"
        )


def _content(descriptor: int | None) -> bytes:
    """All bytes of an open file."""
    parts: list[bytes] = []
    offset = 0
    while descriptor is not None and (part := os.pread(descriptor, 1 << 24, offset)):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The row of a line; None where it is no answer."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    complete = isinstance(row, dict) and isinstance(row.get("id"), str) and _is_chat(row.get("messages"))
    return row if complete else None


def _is_chat(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(message, dict) for message in messages)
    )


def _is_begun(line: bytes) -> bool:
    """Whether it may be the beginning of an answer's line; a power cut leaves zeros behind it. Any other line
    was written by somebody else, and is not cut off."""
    begun = line.rstrip(b"\0")
    return begun[: len(_BEGIN)] == _BEGIN[: len(begun)]
