"""What is known of a run or a sweep from outside: its journal, its receipts, and whether its driver lives."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attar.checkpoint.atomic import try_lock
from attar.checkpoint.units import seconds_text, table
from attar.cluster.journal import FILE, TaskStatus, read_lines, statuses
from attar.errors import DataError
from attar.recipe.runfolder import LOCK, ORIGINAL_RECEIPT, RECEIPTS, own_folders, read_receipt, read_run

SWEEP = "sweep.json"


@dataclass(frozen=True)
class RunStatus:
    """A run's or a sweep's tasks.

    Attributes:
        process: id of the process that works on it; "": none does.
    """

    path: Path
    process: str
    tasks: tuple[TaskStatus, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON content."""
        tasks = [asdict(task) for task in self.tasks]
        return {"path": str(self.path), "process": self.process or None, "tasks": tasks}

    def text(self) -> str:
        """A row per task, and one line for all."""
        rows = [
            (
                task.task,
                task.state,
                str(task.attempts or ""),
                seconds_text(task.seconds),
                task.message or task.worker,
            )
            for task in self.tasks
        ]
        counts = Counter(task.state for task in self.tasks)
        summary = ", ".join(f"{count} {state}" for state, count in counts.items()) or "nothing is done yet"
        alive = f"process {self.process} is at work" if self.process else "no process is at work"
        return f"{table(('task', 'state', 'starts', 'time', ''), rows)}\n\n{self.path}: {summary}; {alive}"


def read_status(folder: Path) -> RunStatus:
    """The status of the folder of a run or a sweep.

    Raises:
        DataError: it is neither.
    """
    if not (folder / SWEEP).is_file() and read_run(folder) is None:
        raise DataError(
            f"{folder}: is neither a run nor a sweep", hint="give a folder of attar run or attar sweep"
        )
    process = _holder(folder / LOCK)
    recorded = statuses(read_lines(folder / FILE))
    if not recorded:
        return RunStatus(folder, process, tuple(_of_receipts(folder, process)))
    left = [task if process or task.state != "started" else _interrupted(task) for task in recorded]
    return RunStatus(folder, process, tuple(left))


def _interrupted(task: TaskStatus) -> TaskStatus:
    return TaskStatus(
        task.task, "interrupted", task.attempts, task.seconds, message="the same command goes on"
    )


def _of_receipts(folder: Path, process: str) -> list[TaskStatus]:
    """The stages of a run without a journal, in the order of their folders."""
    names = sorted(own_folders(folder))
    if (folder / RECEIPTS / f"{ORIGINAL_RECEIPT}.json").is_file():
        names = [ORIGINAL_RECEIPT, *names]
    tasks = []
    for name in names:
        receipt = read_receipt(folder, name)
        if receipt is not None and (receipt.finished or name == ORIGINAL_RECEIPT):
            tasks.append(TaskStatus(name, "done", 1, receipt.seconds))
            continue
        working = (folder / f".{name}.work").is_dir()
        state = ("started" if process else "interrupted") if working else "waiting"
        tasks.append(TaskStatus(name, state, int(working), receipt.seconds if receipt else 0.0))
    return tasks


def _holder(lock: Path) -> str:
    """The process that holds a lock; "" where nobody does."""
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except OSError:
        return ""
    try:
        if try_lock(descriptor):
            return ""
        return os.pread(descriptor, 32, 0).decode(errors="replace").strip()
    finally:
        os.close(descriptor)
