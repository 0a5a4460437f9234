"""Which files a test flushed to the disk, and which took a name, in the order of the calls."""

import os
from pathlib import Path

import pytest


def record_flushes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """Two kinds of events from now on: ``("flush", file)``, ``("rename", new name)``."""
    events: list[tuple[str, Path]] = []

    def fsync(descriptor: int) -> None:
        events.append(("flush", Path(f"/proc/self/fd/{descriptor}").readlink()))

    def noted(real):
        def rename(self, target):
            events.append(("rename", Path(target)))
            return real(self, target)

        return rename

    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("rename", "replace"):
        monkeypatch.setattr(Path, name, noted(getattr(Path, name)))
    return events
