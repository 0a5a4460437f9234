"""Measured losses, one JSON line each, so that a resumed search or soup does not measure them again.

A line is found by the numbers that were tried (a search's coefficients, a soup's ingredients); the order of
the lines has no meaning.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attar.checkpoint.atomic import explain_os_errors, write_bytes


@dataclass
class LossCache:
    """Losses by the numbers that were tried.

    Attributes:
        path: the file, valid for one text and one set of models; None: nothing is written.
    """

    path: Path | None = None
    _losses: dict[tuple[float, ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is None or not self.path.is_file():
            return
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        complete = [line for line in lines if self._read(line)]
        if len(complete) < len(lines):  # cut short by a kill; drop it before the next line is appended
            write_bytes(self.path, "".join(f"{line}\n" for line in complete).encode())

    def loss(self, values: Sequence[float], measure: Callable[[], float]) -> float:
        """The loss of ``values``: cached, or measured now and written; one that is not finite is infinite.

        Raises:
            OutputError: the file cannot be written.
        """
        key = tuple(values)
        if key not in self._losses:
            loss = measure()
            self._losses[key] = loss if math.isfinite(loss) else math.inf
            self._write(key)
        return self._losses[key]

    def _read(self, line: str) -> bool:
        try:
            row = json.loads(line)
            loss = row["loss"]
            self._losses[tuple(row["tried"])] = math.inf if loss is None else float(loss)
        except (ValueError, TypeError, KeyError, RecursionError):
            return False
        return True

    def _write(self, key: tuple[float, ...]) -> None:
        if self.path is None:
            return
        line = json.dumps({"tried": list(key), "loss": finite(self._losses[key])}) + "\n"
        with explain_os_errors(self.path, len(line)), self.path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def finite(loss: float) -> float | None:
    """A loss for JSON: None where it is infinite."""
    return loss if math.isfinite(loss) else None
