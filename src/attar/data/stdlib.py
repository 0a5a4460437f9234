"""``python-stdlib``: the running Python's own standard-library source as a text data set.

Every machine that runs attar has it, so the demo and the tests need no network. Whole files go to one split,
chosen by a hash of their path inside the library: a file is in the same split on every machine and in every
Python version.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SPLITS = {"train": range(90), "calibration": range(90, 95), "evaluation": range(95, 100)}
"""Which per cent of the hash belongs to which split."""

SKIP = ("site-packages", "dist-packages", "__pycache__", "lib2to3/tests/data", "config-")
LARGEST = 400_000  # bytes: longer files are generated tables


def split_of(path: str) -> str:
    """The split of a file, from the first 32 bits of SHA-256 over its relative POSIX path, modulo 100."""
    bucket = int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") % 100
    return next(name for name, buckets in SPLITS.items() if bucket in buckets)


def files(split: str) -> list[tuple[str, Path]]:
    """(relative path, file) of one split, sorted by the path."""
    return [(name, file) for name, file in all_files() if split_of(name) == split]


def all_files() -> list[tuple[str, Path]]:
    """(relative path, file) of every split, sorted by the path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = []
    for folder, folders, names in os.walk(root):
        here = Path(folder).relative_to(root)
        # an environment's site-packages have many times the files of the library
        folders[:] = [name for name in folders if not _skipped(here / name)]
        paths += [here / name for name in names if name.endswith(".py") and not _skipped(here / name)]
    return sorted((path.as_posix(), root / path) for path in paths)


def _skipped(path: Path) -> bool:
    return any(part in path.as_posix() for part in SKIP)


def texts(split: str) -> Iterator[tuple[str, str]]:
    """(relative path, source text) of the readable UTF-8 files of one split, sorted by the path."""
    for name, file in files(split):
        raw = file.read_bytes()
        if not 0 < len(raw) <= LARGEST:
            continue
        try:
            yield name, raw.decode("utf-8")
        except UnicodeDecodeError:  # test data in other encodings
            continue
