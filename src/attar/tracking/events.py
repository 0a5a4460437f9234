"""The events of a run: it starts, a step has numbers, it ends."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

_UNSAFE = re.compile(r"[^\w./ -]")  # what MLflow takes in the name of a metric, and all others too


@dataclass(frozen=True, kw_only=True)
class TrackEvent:
    """A record of a run.

    Attributes:
        kind: a run starts, one of its tasks has done a step, the run ends.
        run: its id; a run that goes on after an interruption keeps it, and starts again.
        name, group: of the run; the stages of a recipe have the recipe's group, those of a sweep the sweep's.
        verb: ``distill``, ``train-head``, ...
        settings: of a start, the run's settings, model and output.
        step: of a step, how many its task has done; of an end, the last one.
        numbers: by ``task/number``, such as ``distill/loss``; of an end, the final measurements.
        state: of an end: ``finished``, ``failed``, or ``stopped``, which the same command goes on with.
    """

    kind: Literal["start", "step", "end"]
    run: str
    name: str
    verb: str
    group: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    numbers: Mapping[str, float] = field(default_factory=dict)
    state: Literal["", "finished", "failed", "stopped"] = ""


Tracker = Callable[[TrackEvent], object]
"""Is called with the events of one run after another, in order; may raise anything."""


def numbers_of(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite numbers of a nested record by their path, ``drafting/tokens``; lists are left out."""
    numbers: dict[str, float] = {}
    for key, value in record.items():
        name = f"{prefix}{_UNSAFE.sub('_', str(key))}"
        if isinstance(value, Mapping):
            numbers |= numbers_of(value, f"{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            numbers[name] = float(value)
    return numbers
