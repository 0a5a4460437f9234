"""Training steps in turns: a runner waits for its turn before each step and reports after it, so that two
tools are measured side by side on a machine whose speed changes. Standard library alone.

A runner writes ``{"ready": true}``, reads a line, does a step, writes its costs, and so on.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


class Turns:
    """The runner's side. What the tool prints goes to standard error."""

    def __init__(self) -> None:
        self.answer = os.dup(1)
        os.dup2(2, 1)
        self.wall = self.cpu = 0.0

    def begin(self) -> None:
        """Wait for the turn; the step's clock starts."""
        reset_peak()
        self.say({"ready": True})
        if not sys.stdin.readline():
            raise SystemExit(0)
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def end(self, loss: float, **more: Any) -> None:
        """Report a step: seconds, seconds of all threads, and the largest resident set during it."""
        costs = {"seconds": time.perf_counter() - self.wall, "cpu": time.process_time() - self.cpu}
        self.say({**costs, "peak_mb": memory("VmHWM"), "loss": loss, **more})

    def say(self, line: dict[str, Any]) -> None:
        """Write one line."""
        os.write(self.answer, (json.dumps(line) + "\n").encode())


def memory(name: str) -> float:
    """A number of this process's memory in 10^6 bytes: VmHWM, VmRSS."""
    match = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024 / 1e6


def reset_peak() -> None:
    """Start a new VmHWM: what loading took does not count. Where the kernel forbids it, it counts."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
