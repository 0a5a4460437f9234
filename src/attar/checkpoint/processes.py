"""Several processes of one run (``--launch N``, ``torchrun -m attar``, ``accelerate launch -m attar``): all
do the same work in step with each other, and the first one writes the output.

    RANK     of a process, from 0; the launcher sets it
    NAME             the output, the first process's
    .NAME.rank-1     what process 1 makes of it in the same way, with its own work folder; removed at the end

Only what training keeps for a resumed run is shared (``walks/train.py``). Once it has trained, a process
leaves the rest to the first one, and waits for it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from attar.checkpoint import atomic
from attar.checkpoint.card import Card
from attar.errors import AttarError, OutputError

POLL = 0.2  # seconds
SHARD = "ACCELERATE_USE_FSDP"  # "true": what is trained is divided, as accelerate launch has it


class LeftToFirst(Exception):  # noqa: N818 (it is no error)
    """The rest of the work is the first process's."""


def rank() -> int:
    """Of this process; 0: the first, or the only one."""
    value = os.environ.get("RANK", "")
    return int(value) if value.isdigit() and int(os.environ.get("WORLD_SIZE") or 1) > 1 else 0


def count() -> int:
    """Processes of the run."""
    return int(os.environ.get("WORLD_SIZE") or 1) if os.environ.get("RANK", "").isdigit() else 1


def own_output(final: Path) -> Path:
    """Where this process writes an output."""
    return final if not rank() else atomic.hidden(final, f"rank-{rank()}")


def wait_for_first(final: Path, key: str, lock: Path) -> None:
    """Wait until the first process has written the output.

    Args:
        lock: the file that it holds while it works.

    Raises:
        OutputError: it ended without.
    """
    while not _written(final, key):
        if not _held(lock) and not _written(final, key):
            raise OutputError(f"{final}: the first process did not finish it", hint="its error says why")
        time.sleep(POLL)


def _written(final: Path, key: str) -> bool:
    try:
        card = Card.read(final)
    except AttarError:
        return False
    return card is not None and card.key == key


def _held(lock: Path) -> bool:
    """Whether a process holds a lock."""
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except OSError:
        return False
    try:
        return not atomic.try_lock(descriptor)
    finally:
        os.close(descriptor)
