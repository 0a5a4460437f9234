"""Ctrl-C and SIGTERM while a training runs: the step ends, its state is written, the process ends.

A second signal ends the process at once. Of several processes (``--launch``, ``--jobs``) the one that a
person started gets Ctrl-C and sends the others SIGTERM: those ignore Ctrl-C itself.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SAVE_S = 300.0
"""Seconds between two states of a training at most."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StoppedError(KeyboardInterrupt):
    """A training that ended after its state was written.

    Args:
        number: the signal that asked for it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class Interruption:
    """What a loop of steps asks after each one: whether to write its state, and whether to end.

    Attributes:
        signal: the first that came; 0: none.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._saved_at = time.monotonic()

    def due(self) -> bool:
        """Whether a state must be written now: a signal came, or the last state is old."""
        return bool(self.signal) or time.monotonic() - self._saved_at >= SAVE_S

    def saved(self) -> None:
        """The state is written. Raises StoppedError where a signal came."""
        self._saved_at = time.monotonic()
        if self.signal:
            raise StoppedError(self.signal)


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Have the first SIGINT or SIGTERM be asked for (:meth:`Interruption.due`), and the second do what it did
    before. In threads, which get no signals, and for signals that are ignored nothing changes."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    caught = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]

    def restore() -> None:
        for number in caught:
            signal.signal(number, before[number])

    def first(number: int, frame: object) -> None:
        interruption.signal = number
        restore()

    for number in caught:
        signal.signal(number, first)
    try:
        yield interruption
    finally:
        restore()


class StateFile:
    """The state of a training that one file holds, such as a block's.

    Args:
        path: None: the training cannot be resumed.
    """

    def __init__(self, path: Path | None = None, interruption: Interruption | None = None) -> None:
        self._path, self._interruption = path, interruption or Interruption()

    def load(self) -> dict[str, Any] | None:
        """The state that was written last; None without one."""
        import torch

        if self._path is None or not self._path.is_file():
            return None
        state: dict[str, Any] = torch.load(self._path, weights_only=True)
        return state

    def step(self, state: Callable[[], dict[str, Any]]) -> None:
        """After each step: write the state if it is due.

        Raises:
            StoppedError: a signal came.
        """
        import torch

        from attar.checkpoint import atomic

        if self._path is None or not self._interruption.due():
            return
        with atomic.file(self._path) as partial:
            torch.save(state(), partial)
        self._interruption.saved()

    def remove(self) -> None:
        """The training is done."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
