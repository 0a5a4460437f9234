"""Where the parents of a merge disagree, measured while it is merged."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from torch import Tensor

from attar.checkpoint.atomic import write_bytes
from attar.merging.conflicts import Conflict, measure_conflicts, summary
from attar.merging.planning.plan import Output, Plan


@dataclass
class Disagreement:
    """Compares task vectors while they are merged; a killed merge goes on with what it knew.

    Attributes:
        file: a line for every tensor that was compared.
    """

    file: Path
    _known: dict[str, Conflict] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        lines = self.file.read_bytes().splitlines(keepends=True) if self.file.is_file() else []
        if lines and not lines[-1].endswith(
            b"\n"
        ):  # a kill cut it short, and the next must not be joined to it
            write_bytes(self.file, b"".join(lines[:-1]))
            lines.pop()
        for row in map(json.loads, lines):
            self._known[row["name"]] = Conflict.from_plain(row["sums"])

    def look(self, output: Output, tensors: list[Tensor], base: Tensor) -> None:
        """See one tensor; several threads may look at once."""
        if len(tensors) < 2 or output.name in self._known:
            return
        found = measure_conflicts(tensors, base)
        with self._lock, self.file.open("a") as file:
            self._known[output.name] = found
            file.write(json.dumps({"name": output.name, "sums": found.plain()}) + "\n")

    def details(self, plan: Plan) -> dict[str, Any]:
        """``conflicts`` for the card, rows by layer and part, and ``conflict_models``, their names."""
        models = dict.fromkeys(
            tuple(item.model for item in output.inputs)
            for output in plan.outputs
            if output.name in self._known
        )
        if len(models) != 1:  # slices of different models have nothing in common to compare
            return {}
        found = [
            (output.name, output.layer, self._known[output.name])
            for output in plan.outputs
            if output.name in self._known
        ]
        labels = [Path(plan.labels[model]).name for model in next(iter(models))]
        rows = summary(found)
        return {"conflicts": rows, "conflict_models": labels} if rows else {}
