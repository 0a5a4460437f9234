"""A process that quantizes or evaluates: a line of JSON in, lines out, the last one is its result or error.

    {"tool": "quantize", "arguments": {...}}  →  {"task": ..., "done": 3, "total": 8, "numbers": {...}}
                                                 {"log": ...}
                                                 {"result": {...}}  or  {"error": message}

It ends at SIGTERM, and when its input does, as the work can be gone on with: a training writes its state.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from attar.errors import AttarError
from attar.progress import Progress, ProgressTask
from attar.settings import PythonOrigin, parse

EVERY_S = 0.2
"""Seconds between two lines of progress."""


class LineProgress:
    """Writes progress as lines of JSON."""

    def __init__(self, output: BinaryIO) -> None:
        self._output = output

    def write(self, record: dict[str, Any]) -> None:
        """Write a line."""
        self._output.write(json.dumps(record).encode() + b"\n")
        self._output.flush()

    @contextmanager
    def task(self, what: str, total: int, done: int = 0) -> Iterator[ProgressTask]:
        """Open a task, and say how far it is."""
        task = _JsonTask(self, what, total, done)
        task.say()
        yield task
        task.say()

    def log(self, line: str) -> None:
        """Write a line of words."""
        self.write({"log": line})


class _JsonTask:
    def __init__(self, lines: LineProgress, what: str, total: int, done: int) -> None:
        self._lines, self._what, self._total, self._done = lines, what, total, done
        self._numbers: dict[str, float] = {}
        self._last = time.monotonic()

    def advance(self, n: int = 1, **numbers: float) -> None:
        self._done += n
        self._numbers = numbers or self._numbers
        if time.monotonic() - self._last >= EVERY_S:
            self.say()

    def say(self) -> None:
        self._last = time.monotonic()
        numbers = {name: str(value) for name, value in self._numbers.items()}
        record = {"task": self._what, "done": self._done, "total": self._total, "numbers": numbers}
        self._lines.write(record)


def quantize(model: str, out: str, settings: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Quantize a model: the fields of a ``CheckpointResult``. Raises AttarError."""
    from attar.recipe.stages import STAGES
    from attar.tracking.events import numbers_of
    from attar.verbs import run_stage

    checked: Any = parse(STAGES["quantize"].settings_class(), settings, PythonOrigin("quantize"))
    start = time.monotonic()
    checkpoint = run_stage("quantize", model, out, checked, progress=progress)
    card = checkpoint.card
    assert card is not None, "a stage writes a card"
    return {
        "path": str(checkpoint.path),
        "bytes": checkpoint.nbytes,
        "seconds": time.monotonic() - start,
        "numbers": numbers_of({**card.measurements, **card.details}),
        "licence": card.licence,
        "command": card.command,
    }


def evaluate(
    model: str, reference: str | None, settings: dict[str, Any], progress: Progress
) -> dict[str, Any]:
    """Measure a model: the measurements as ``attar evaluate --json`` prints them. Raises AttarError."""
    from attar.checkpoint.card import plain
    from attar.measure.settings import EvaluateSettings
    from attar.verbs import run_evaluate

    checked = parse(EvaluateSettings, settings, PythonOrigin("evaluate"))
    measured = run_evaluate(model, checked, reference=reference, progress=progress)
    content: dict[str, Any] = plain(measured.to_dict())
    return content


TOOLS: dict[str, Callable[..., dict[str, Any]]] = {"quantize": quantize, "evaluate": evaluate}


def main() -> None:
    """Read the request, do it, and write its end."""
    lines = LineProgress(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)  # what libraries print is no answer
    request = json.loads(sys.stdin.buffer.readline())
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # folders that are half written are removed
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        end = _answer(request, lines)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends anyway
    except KeyboardInterrupt as error:
        sys.exit(getattr(error, "exit_code", 143))
    lines.write(end)


def _answer(request: dict[str, Any], lines: LineProgress) -> dict[str, Any]:
    """The last line."""
    try:
        return {"result": TOOLS[request["tool"]](**request["arguments"], progress=lines)}
    except AttarError as error:
        return {"error": str(error)}
    except MemoryError as error:
        return {"error": f"out of memory: {error}"}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"this is a bug of attar: {type(error).__name__}: {error}"}


def _end_with_input() -> None:
    """The server is gone."""
    while os.read(0, 1024):  # sys.stdin would hold a lock while Python ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
