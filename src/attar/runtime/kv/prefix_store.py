"""Blocks of cached prefixes on disk: a server reads them after a restart, and another one beside it.

    key_(i+1) = SHA-256(key_i, tokens of block i),  key_0 = SHA-256(identity, salt)    names a block's file
    FOLDER/KK/KEY: SHA-256(KEY, content), content                    all layers' keys and values of a block

The identity names all else that a block's numbers depend on: model, runner, formats. The salt is
the tenant. A file appears by rename, so that a process that is killed leaves none or a hidden one; a file
without its checksum is removed and counts as absent. Beyond the bound the files used least recently go.
Files are written by a thread of their own, read by the caller.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import numpy as np

from attar.checkpoint.atomic import explain_os_errors
from attar.checkpoint.units import byte_count
from attar.errors import SettingsError

DEFAULT_BYTES = 10 * 10**9
MOST_QUEUED = 1 << 28  # bytes that wait to be written; what exceeds it is not kept
LEFTOVER_S = 3600.0  # a hidden file of this age belongs to a process that was killed
DIGEST = 32

logger = logging.getLogger(__name__)


class PrefixStore:
    """Files of blocks, within a bound.

    Args:
        folder: made where it is missing, for this user alone.
        most_bytes: of all files.
        identity: of the blocks' content.
        read, write: the content of a block of the pool; the runner's.

    Raises:
        SettingsError: other users may write to the folder.
        OutputError: it cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        most_bytes: int,
        identity: str,
        *,
        read: Callable[[int], bytes],
        write: Callable[[int, bytes], None],
    ) -> None:
        self.folder, self.most_bytes, self._identity = folder, most_bytes, identity
        self._read, self._write = read, write
        with explain_os_errors(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise SettingsError("prefix_store", str(folder), "a folder that no other user may write")
            for path in folder.glob("*/.*.partial"):
                with suppress(OSError):
                    if path.stat().st_mtime < time.time() - LEFTOVER_S:
                        path.unlink()
        self._bytes = sum(size for _, size, _ in self._files())
        self._queue: SimpleQueue[tuple[str, bytes] | None] = SimpleQueue()
        self._known, self._failed = set[str](), False
        self._size = DIGEST + len(read(0))
        self._numbers = itertools.count()
        self._thread: Thread | None = None

    def extend(self, keys: list[str], tokens: Sequence[int], salt: str, block_size: int) -> None:
        """Append the keys of the full blocks of ``tokens`` that ``keys`` does not have."""
        digest = bytes.fromhex(keys[-1]) if keys else _digest(f"{self._identity}\0{salt}".encode())
        for start in range(len(keys) * block_size, len(tokens) - block_size + 1, block_size):
            edge = np.asarray(tokens[start : start + block_size], dtype="<i8").tobytes()
            digest = _digest(digest, edge)
            keys.append(digest.hex())

    def restore(self, key: str, block: int) -> bool:
        """Write the content of a key into a block of the pool; False: there is none."""
        path = self._path(key)
        try:
            data = path.read_bytes()
            if data[:DIGEST] != _digest(bytes.fromhex(key), data[DIGEST:]) or len(data) != self._size:
                logger.warning("%s: a damaged block was removed", path)
                path.unlink(missing_ok=True)
                return False
            self._write(block, data[DIGEST:])
            os.utime(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._warn(error)
            return False
        self._known.add(key)
        return True

    def has(self, key: str) -> bool:
        """Whether there is a file of a key; its content is not verified."""
        return self._path(key).exists()

    def save(self, key: str, block: int) -> None:
        """Keep a block's content, unless it is kept already or too much waits to be written."""
        if key in self._known or self._failed:
            return
        if self.has(key):
            self._known.add(key)
            return
        if self._queue.qsize() * self._size > MOST_QUEUED or self._size > self.most_bytes:
            return
        self._known.add(key)
        if self._thread is None:
            self._thread = Thread(target=self._work, name="attar-prefix-store", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        self._queue.put((key, self._read(block)))

    def close(self) -> None:
        """Write what waits, and end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
            atexit.unregister(self.close)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                self._put(*job)
            except OSError as error:
                self._warn(error)

    def _put(self, key: str, content: bytes) -> None:
        """Write a file under a hidden name, then rename it. A checksum makes up for an fsync: what a power
        cut left half written is not read."""
        path, data = self._path(key), _digest(bytes.fromhex(key), content) + content
        path.parent.mkdir(mode=0o700, exist_ok=True)
        hidden = path.with_name(f".{path.name}-{os.getpid()}-{next(self._numbers)}.partial")
        try:
            descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            hidden.replace(path)
        except BaseException:
            hidden.unlink(missing_ok=True)
            raise
        self._bytes += len(data)
        if self._bytes > self.most_bytes:
            self._make_room()

    def _make_room(self) -> None:
        """Remove the files used least recently, until a tenth is free: also those that others wrote."""
        files = sorted(self._files())
        self._bytes = sum(size for _, size, _ in files)
        for _, size, path in files:
            if self._bytes <= 0.9 * self.most_bytes:
                break
            with suppress(OSError):
                path.unlink()
                self._known.discard(path.parent.name + path.name)
            self._bytes -= size

    def _files(self) -> list[tuple[int, int, Path]]:
        """When a file was last used, its bytes, and its path."""
        files = []
        for path in self.folder.glob("??/*"):
            with suppress(OSError):
                status = path.stat()
                if not path.name.startswith("."):
                    files.append((status.st_mtime_ns, status.st_size, path))
        return files

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / key[2:]

    def _warn(self, error: OSError) -> None:
        """A disk that fails costs the store, not the server."""
        if not self._failed:
            logger.warning("the prefix store writes no more: %s: %s", self.folder, error.strerror or error)
        self._failed = True


def store_setting(text: str) -> tuple[Path, int]:
    """Folder and bound of ``FOLDER`` or ``FOLDER:SIZE``.

    Raises:
        SettingsError: the size is no size, or 0.
    """
    folder, separator, size = text.rpartition(":")
    if not separator:
        return Path(text).expanduser(), DEFAULT_BYTES
    most = byte_count("prefix_store", size)
    if not folder or not most:
        raise SettingsError("prefix_store", text, "FOLDER or FOLDER:SIZE, such as /var/cache/attar:20GB")
    return Path(folder).expanduser(), most


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()
