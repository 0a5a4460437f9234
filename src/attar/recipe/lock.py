"""One run per folder at a time.

The lock is a record lock of the system on ``.lock``, which dies with its process: a killed run leaves nothing
to clean up, whatever number its process had. The file holds the process id, for people.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attar.checkpoint.atomic import explain_os_errors
from attar.errors import OutputError

FILE = ".lock"


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold the run folder (made if need be) while the block runs.

    Raises:
        OutputError: another run is at work there, or the folder cannot be written.
    """
    path = run / FILE
    with explain_os_errors(path):
        try:
            run.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise OutputError(
                f"{error.filename}: a file is in the way", hint="choose another folder"
            ) from None
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _take(descriptor, run)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, run: Path) -> None:
    try:
        # not flock: forked children would inherit that, and an orphaned worker would block the next run
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        hint = "wait for it, stop it, or choose another folder with -o"
        raise OutputError(f"{run}: another run is at work there (process {holder})", hint=hint) from None
