"""Hashes of files (with a cache), of JSON in its canonical form, and of a stage's work."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_RACY_SECONDS = 2.0


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex.

    The digest is cached under ``$XDG_CACHE_HOME/attar`` by (path, inode, size, modification time in ns). A
    file changed less than two seconds ago is not cached: it could change again within the same time stamp.
    """
    real = Path(os.path.realpath(path))
    before = real.stat()
    entry = _cache_entry(real, before)
    cached = _read_cache(entry)
    if cached:
        return cached
    with real.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    after = real.stat()
    unchanged = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    if unchanged and time.time() - after.st_mtime > _RACY_SECONDS:
        _write_cache(entry, digest)
    return digest


def in_parallel(function: Callable[[T], str], items: Iterable[T]) -> list[str]:
    """Hashes of several items, one thread for each processor."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(function, items))


def sha256_text(text: str) -> str:
    """SHA-256 of a text's UTF-8 bytes, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def canonical_json(obj: Any) -> str:
    """Equal text for equal objects: sorted keys, no spaces, tuples as lists. NaN is refused."""
    return json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def identity(stage: str, version: int, settings: dict[str, Any], inputs: list[str]) -> str:
    """Hash of everything that a stage's result depends on: equal identity means equal bytes.

    Args:
        version: code version of the stage; raised when its result changes.
        inputs: fingerprints of the inputs, in order.
    """
    return sha256_text(
        canonical_json({"stage": stage, "version": version, "settings": settings, "inputs": inputs})
    )


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/attar``, or ``~/.cache/attar``; may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attar"


def computed_folder() -> Path:
    """The folder of what was computed or measured here: ``$ATTAR_CACHE``, or :func:`cache_folder`."""
    chosen = os.environ.get("ATTAR_CACHE")
    return Path(chosen).expanduser().absolute() if chosen else cache_folder()


def _cache_entry(path: Path, stat: os.stat_result) -> Path:
    key = sha256_text(f"{path}\n{stat.st_ino}\n{stat.st_size}\n{stat.st_mtime_ns}")
    return cache_folder() / "sha256" / key[:2] / key


def _read_cache(entry: Path) -> str | None:
    """A cached digest; None if it is missing, or damaged by a power cut: entries are not fsynced."""
    try:
        digest = entry.read_text()
    except (OSError, UnicodeDecodeError):
        return None
    return digest if re.fullmatch("[0-9a-f]{64}", digest) else None


def _write_cache(entry: Path, digest: str) -> None:
    """Write an entry; its temporary name has the process id, because others may write the same entry."""
    partial = entry.with_name(f"{entry.name}.{os.getpid()}")
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(digest)
        partial.replace(entry)
    except OSError:
        pass  # a cache that cannot be written costs time, nothing else
