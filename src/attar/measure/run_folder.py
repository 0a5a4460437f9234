"""The record of a run: its ``run.json``.

The first stage is the original model. Measurements that were not made are absent.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attar.errors import DataError
from attar.measure.numbers import NORMAL_95

ENCODER_TASKS = ("classification", "masked")  # of the measurements of encoders
_TEXT = ("reference", "data", "tokens")  # alike where two models were measured on the same rows


@dataclass(frozen=True)
class StageRecord:
    """One checkpoint of a run.

    Attributes:
        name: unique in the run; verb: distill, prune, ... or ``original``; title: its settings in one line.
        parents: names of its parents; the first is the parent of the weights.
        measurements: the record of ``attar evaluate`` (``bytes`` also without it).
        details: of the stage's card (layers, curve).
    """

    name: str
    verb: str = ""
    title: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    parents: tuple[str, ...] = ()
    path: str = ""
    seconds: float | None = None
    peak_rss_bytes: float | None = None
    measurements: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    def number(self, key: str) -> float | None:
        """A measured number, or None where it was not measured or is not a number."""
        value = self.measurements.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
            return None
        return float(value)

    def text(self, key: str) -> str | None:
        """A measured text, or None."""
        value = self.measurements.get(key)
        return value if isinstance(value, str) else None

    def kl_differs(self, other: StageRecord) -> bool:
        """Whether the KLs of both say which is nearer to the original.

        They differ by more than the noise floor, and than the 95 % interval of their difference: over pairs
        of rows, where both were measured on the same ones. Records without errors are told apart by any
        difference.
        """
        ours, theirs = self.number("kl_mean"), other.number("kl_mean")
        if ours is None or theirs is None:
            return False
        floor = max(stage.number("kl_noise_floor") or 0.0 for stage in (self, other))
        return abs(ours - theirs) > max(floor, NORMAL_95 * self._kl_difference_stderr(other))

    def _kl_difference_stderr(self, other: StageRecord) -> float:
        texts = [[stage.measurements.get(key) for key in _TEXT] for stage in (self, other)]
        ours, theirs = (stage.measurements.get("kl_rows") or () for stage in (self, other))
        if texts[0] == texts[1] and len(ours) == len(theirs) > 1:
            differences: list[float] = [a - b for a, b in zip(ours, theirs, strict=True)]
            return statistics.stdev(differences) / math.sqrt(len(differences))
        return math.hypot(*(stage.number("kl_mean_row_stderr") or 0.0 for stage in (self, other)))

    def rows(self, key: str) -> list[Mapping[str, Any]]:
        """A table in the details (``layers``, ``curve``): its rows, or none."""
        rows = self.details.get(key)
        return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


@dataclass(frozen=True)
class RunRecord:
    """A run: its stages in order, and its environment.

    Attributes:
        written: the recipe as YAML, without what are defaults; "" in records of earlier versions.
        date: when it was measured, ``2026-11-27``; "" where that is not known.
    """

    stages: tuple[StageRecord, ...]
    folder: Path | None = None
    attar: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    finished: bool = True
    written: str = ""
    date: str = ""

    @property
    def original(self) -> StageRecord:
        """The model that the run compresses."""
        return self.stages[0]

    @property
    def last(self) -> StageRecord:
        """The last stage with measured quality; without any, the last stage."""
        measured = (stage for stage in reversed(self.stages) if stage.number("perplexity") is not None)
        return next(measured, self.stages[-1])

    def not_held_out(self) -> list[str]:
        """A sentence for each stage that was not measured on held-out text."""
        notes = ((stage.name, stage.text("held_out_note")) for stage in self.stages)
        return [f"{name} is not measured on held-out text: {note}." for name, note in notes if note]

    def parent(self, stage: StageRecord) -> StageRecord | None:
        """The stage whose weights this one started from."""
        return next((other for other in self.stages if stage.parents[:1] == (other.name,)), None)

    def children(self, stage: StageRecord) -> list[StageRecord]:
        """The stages that started from its weights, in order."""
        return [other for other in self.stages if other.parents[:1] == (stage.name,)]

    def times_smaller(self, stage: StageRecord) -> float | None:
        """Bytes of the original over bytes of the stage."""
        before, after = self.original.number("bytes"), stage.number("bytes")
        return before / after if before and after else None


def read_run(folder: str | Path) -> RunRecord:
    """Read ``folder/run.json``.

    Raises:
        DataError: it is missing or damaged.
    """
    folder = Path(folder)
    path = folder / "run.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{path} does not exist", hint="give a folder that attar run or attar demo wrote"
        ) from None
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:  # bad JSON, or not UTF-8
        raise DataError(
            f"{path} is not JSON: {problem}", hint="run the recipe again: it rewrites the file"
        ) from None
    return run_from_dict(data, folder, str(path))


def run_from_dict(data: Any, folder: Path | None = None, where: str = "run.json") -> RunRecord:
    """A run from the contents of ``run.json``.

    Raises:
        DataError: a field is missing or has the wrong type.
    """
    if not isinstance(data, Mapping):
        raise DataError(f"{where} is not a run: a mapping was expected, not {type(data).__name__}")
    entries = data.get("stages")
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{where}: 'stages' must be a list with one stage at least")
    stages = tuple(_stage(entry, number, where) for number, entry in enumerate(entries))
    mappings = {name: _mapping(data.get(name)) for name in ("recipe", "machine", "versions")}
    attar, written, date = (str(data.get(name) or "") for name in ("attar", "written", "date"))
    finished = bool(data.get("finished", True))
    return RunRecord(stages, folder, attar, **mappings, finished=finished, written=written, date=date)


def _stage(entry: Any, number: int, where: str) -> StageRecord:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise DataError(f"{where}: stage {number} has no 'name'")
    parents = entry.get("parents") or []
    if isinstance(parents, str) or not isinstance(parents, list):
        raise DataError(f"{where}: 'parents' of stage {entry['name']!r} must be a list of names")
    return StageRecord(
        name=entry["name"],
        verb=str(entry.get("stage") or ""),
        title=str(entry.get("title") or ""),
        parents=tuple(str(parent) for parent in parents),
        path=str(entry.get("path") or ""),
        seconds=entry.get("seconds"),
        peak_rss_bytes=entry.get("peak_rss_bytes"),
        settings=_mapping(entry.get("settings")),
        measurements={
            **({"bytes": entry["bytes"]} if entry.get("bytes") else {}),
            **_mapping(entry.get("measurements")),
        },
        details=_mapping(entry.get("details")),
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
