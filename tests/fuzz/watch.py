"""Runs a target on inputs and keeps what goes wrong: an escaped exception, a slow input, too much memory."""

from __future__ import annotations

import hashlib
import json
import resource
import time
import traceback
from collections.abc import Callable
from pathlib import Path

SECONDS = 1.0
"""Processor time that one input may take."""

MEMORY = 1 << 30
"""Bytes that one input may take beyond what the process has when it begins."""


class Watched:
    """A target whose failures are written to a folder, each kind once.

    Attributes:
        runs: inputs handled.
        slowest: most processor time of one input, in seconds.
        findings: one line for each kind of failure.
    """

    def __init__(self, target: Callable[[bytes], object], folder: Path) -> None:
        self.target, self.folder = target, folder
        self.runs, self.slowest = 0, 0.0
        self.findings: dict[str, str] = {}

    def __call__(self, data: bytes) -> None:
        """Handle one input; never raises an Exception."""
        start = time.process_time()
        failure = None
        try:
            self.target(data)
        except Exception as error:
            failure = error
        seconds = time.process_time() - start
        self.runs += 1
        self.slowest = max(self.slowest, seconds)
        if failure is not None:
            self._keep(_raised_at(failure), f"{type(failure).__name__}: {failure}", data)
        elif seconds > SECONDS:
            self._keep("slow", f"{seconds:.1f} s", data)
        if self.runs % 1000 == 0:
            self.report()

    def report(self) -> None:
        """Write the counts, for the process that reads them."""
        counts = {"runs": self.runs, "slowest": self.slowest, "findings": self.findings}
        (self.folder / "counts.json").write_text(json.dumps(counts))

    def _keep(self, place: str, message: str, data: bytes) -> None:
        if place in self.findings:
            return
        name = f"finding-{hashlib.sha256(data).hexdigest()[:16]}"
        (self.folder / name).write_bytes(data)
        self.findings[place] = f"{name}: {place}: {message[:200]}"
        print(self.findings[place], flush=True)
        self.report()


def limit_memory() -> None:
    """From now on the process may take :data:`MEMORY` more bytes; beyond that allocation fails."""
    status = Path("/proc/self/status")
    if not status.exists():  # the limit is Linux's alone
        return
    kilobytes = next(line for line in status.read_text().splitlines() if line.startswith("VmData"))
    used = int(kilobytes.split()[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, used + MEMORY))


def _raised_at(error: Exception) -> str:
    """File and line of attar's innermost frame, which tells one failure from another."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/attar/" in frame.filename] or frames
    return f"{type(error).__name__} at {Path(ours[-1].filename).name}:{ours[-1].lineno}"
