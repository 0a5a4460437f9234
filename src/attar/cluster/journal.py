"""The journal of the driver: a JSON line for each event, appended and flushed to the disk.

A line that a kill cut off is ignored, and closed before the next one is written.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attar.checkpoint.atomic import explain_os_errors, open_own
from attar.errors import DataError

FILE = "journal.jsonl"


class Appender:
    """Appends lines to a file, each of them flushed.

    Raises:
        OutputError: it cannot be written.
        DataError: there is another file of that name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with explain_os_errors(path):
            self._file = open_own(path)
            self._descriptor = self._file.fileno()
            size = self._file.seek(0, os.SEEK_END)
            if size and os.pread(self._descriptor, 1, 0) not in b"{\n\0":
                self.close()
                raise DataError(
                    f"{path}: is no journal of attar's", hint="move it away, or choose another -o"
                )
            if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                os.write(self._descriptor, b"\n")

    def write(self, record: dict[str, Any]) -> None:
        """Append one record."""
        line = json.dumps(record, ensure_ascii=False) + "\n"
        with explain_os_errors(self.path):
            written = line.encode("utf-8", "replace")
            while written:
                written = written[os.write(self._descriptor, written) :]
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file that :class:`Appender` wrote; damaged lines are left out.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    records = []
    for line in content.split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


class TaskJournal:
    """Events of tasks: ``started``, ``done``, ``failed``, ``lost`` (the worker died) and ``skipped``."""

    def __init__(self, path: Path) -> None:
        self._lines = Appender(path)

    def event(self, task: str, state: str, **details: Any) -> None:
        """Write one event; details that are None or empty are left out."""
        shown = {name: detail for name, detail in details.items() if detail not in (None, "")}
        self._lines.write({"time": round(time.time(), 3), "task": task, "state": state, **shown})

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


@dataclass(frozen=True)
class TaskStatus:
    """What a journal says of a task at its end.

    Attributes:
        attempts: how often it was started.
        seconds: between its last start and its end, or the last event of the journal.
    """

    task: str
    state: str
    attempts: int
    seconds: float
    worker: str = ""
    message: str = ""


def statuses(records: list[dict[str, Any]]) -> list[TaskStatus]:
    """The state of each task of a journal, in the order of their first events.

    A task that a killed driver had started is ``started``; whether its driver is alive is not known here.
    """
    tasks: dict[str, dict[str, Any]] = {}
    for record in records:
        name, state, moment = record.get("task"), record.get("state"), record.get("time")
        if not isinstance(name, str) or not isinstance(state, str) or not isinstance(moment, int | float):
            continue
        task = tasks.setdefault(name, {"attempts": 0, "start": moment, "worker": ""})
        if state == "started":
            task |= {"attempts": task["attempts"] + 1, "start": moment}
        worker, message = str(record.get("worker", task["worker"])), str(record.get("message", ""))
        task |= {"state": state, "end": moment, "worker": worker, "message": message}
    return [
        TaskStatus(
            name,
            task["state"],
            task["attempts"],
            max(task["end"] - task["start"], 0.0),
            task["worker"],
            task["message"],
        )
        for name, task in tasks.items()
    ]
