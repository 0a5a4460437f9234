"""A tracker in a thread of its own: a slow server delays no training, and one that fails ends with a line."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stdout

from attar.printable import one_line
from attar.tracking.events import Tracker, TrackEvent

WAITING = 10_000
"""Events that may wait for a tracker; later ones are dropped."""

PATIENCE_S = 30.0
"""Seconds that the start and the end of a run wait for a tracker."""


class BackgroundTracker:
    """Calls a tracker in a thread.

    Args:
        make: imports the tracker's package; called in the thread at the first event.
        log: where the line of a failure goes.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], log: Callable[[str], None]) -> None:
        self.name, self._make, self._log = name, make, log
        self._events: queue.Queue[TrackEvent] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None
        self._failed = False

    def __call__(self, event: TrackEvent) -> None:
        """Hand an event over. At the start of a run, whose package is imported and whose server answers only
        then, and at its end wait until all are delivered, ``PATIENCE_S`` at most."""
        if self._failed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._deliver, name=f"track-{self.name}", daemon=True)
            self._thread.start()
        try:
            self._events.put_nowait(event)
        except queue.Full:
            self._fail(f"takes no records ({WAITING} wait)")
        if event.kind != "step" and not self._drained() and event.kind == "end":
            self._fail(f"did not take all records in {PATIENCE_S:g} s")

    def _drained(self) -> bool:
        """Wait for the thread; whether all events are delivered, or none will be."""
        end = time.monotonic() + PATIENCE_S
        while self._events.unfinished_tasks and not self._failed:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def _deliver(self) -> None:
        tracker: Tracker | None = None
        while not self._failed:
            event = self._events.get()
            try:
                with redirect_stdout(sys.stderr):  # stdout is for data
                    tracker = tracker or self._make()
                    tracker(event)
            except BaseException as error:  # SystemExit too
                self._fail(f"{type(error).__name__}: {error}")
            self._events.task_done()

    def _fail(self, reason: str) -> None:
        self._failed = True
        self._log(failure_line(self.name, reason))


def failure_line(name: str, reason: str) -> str:
    """The log's line about a tracker that failed."""
    return f"--track {name}: {one_line(reason)[:300]}; the work goes on without it"
