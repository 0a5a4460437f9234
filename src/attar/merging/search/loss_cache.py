"""Losses that were measured already, a JSON line each, so that a killed search or soup goes on where it was.

What was tried is a list of numbers (coefficients of a search, ingredients of a soup); its loss is a fact that
does not depend on when it was asked for, so lines are looked up by it and their order means nothing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attar.checkpoint.atomic import explain_os_errors, write_bytes

Key = tuple[float, ...]


@dataclass
class Journal:
    """Losses by what was tried.

    Attributes:
        path: the file; None: nothing is written. It belongs to one text and one set of models: the caller
            keeps it where that is so, such as the work folder of a stage.
    """

    path: Path | None = None
    _known: dict[Key, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is None or not self.path.is_file():
            return
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        whole = [line for line in lines if self._read(line)]
        if len(whole) < len(lines):  # a kill cut a line short, and the next one must not be joined to it
            write_bytes(self.path, "".join(f"{line}\n" for line in whole).encode())

    def recall(self, tried: Sequence[float], measure: Callable[[], float]) -> float:
        """The loss of what is tried: known, or measured now and written down.

        Args:
            tried: numbers; equal ones have one loss.
            measure: gives the loss; one that is no number is kept as infinite.

        Raises:
            OutputError: the file cannot be written.
        """
        key = tuple(tried)
        if key not in self._known:
            loss = measure()
            self._known[key] = loss if math.isfinite(loss) else math.inf
            self._write(key)
        return self._known[key]

    def _read(self, line: str) -> bool:
        try:
            row = json.loads(line)
            loss = row["loss"]
            self._known[tuple(row["tried"])] = math.inf if loss is None else float(loss)
        except (ValueError, TypeError, KeyError, RecursionError):
            return False
        return True

    def _write(self, key: Key) -> None:
        if self.path is None:
            return
        line = json.dumps({"tried": list(key), "loss": finite(self._known[key])}) + "\n"
        with explain_os_errors(self.path, len(line)), self.path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def finite(loss: float) -> float | None:
    """A loss as JSON has it: None where it is infinite."""
    return loss if math.isfinite(loss) else None
