from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from attar.checkpoint import hashing


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_sha256_of_a_file(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"abc" * 1000)
    assert hashing.sha256_file(path) == hashlib.sha256(b"abc" * 1000).hexdigest()


def test_an_old_file_is_hashed_once(tmp_path, monkeypatch):
    path = tmp_path / "f"
    path.write_bytes(b"one")
    age(path, 60)
    first = hashing.sha256_file(path)

    def fail(*args: object) -> None:
        raise AssertionError("hashed again")

    monkeypatch.setattr(hashlib, "file_digest", fail)
    assert hashing.sha256_file(path) == first


def test_a_changed_file_is_hashed_again(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"one")
    age(path, 60)
    first = hashing.sha256_file(path)
    path.write_bytes(b"two")
    age(path, 30)
    assert hashing.sha256_file(path) != first


def test_a_fresh_file_is_not_remembered(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"one")
    first = hashing.sha256_file(path)
    stat = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size, same time: only the bytes differ
    assert hashing.sha256_file(path) != first


def test_damaged_and_unwritable_caches_are_harmless(tmp_path, monkeypatch):
    path = tmp_path / "f"
    path.write_bytes(b"one")
    age(path, 60)
    first = hashing.sha256_file(path)
    (entry,) = [file for file in hashing.cache_folder().rglob("*") if file.is_file()]
    entry.write_text("torn")
    assert hashing.sha256_file(path) == first
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    assert hashing.sha256_file(path) == first


def test_canonical_json_has_one_spelling():
    assert hashing.canonical_json({"b": (1, 2), "a": "é"}) == '{"a":"é","b":[1,2]}'
    assert hashing.canonical_json({"a": "é", "b": [1, 2]}) == hashing.canonical_json({"b": (1, 2), "a": "é"})
    with pytest.raises(ValueError, match="JSON"):
        hashing.canonical_json(float("nan"))


def test_identity_changes_with_everything_it_is_of():
    base = hashing.identity("prune", 1, {"ratio": 0.25}, ["a", "b"])
    others = [
        hashing.identity("quantize", 1, {"ratio": 0.25}, ["a", "b"]),
        hashing.identity("prune", 2, {"ratio": 0.25}, ["a", "b"]),
        hashing.identity("prune", 1, {"ratio": 0.5}, ["a", "b"]),
        hashing.identity("prune", 1, {"ratio": 0.25}, ["b", "a"]),
    ]
    assert len({base, *others}) == 5
    assert base == hashing.identity("prune", 1, {"ratio": 0.25}, ["a", "b"])
