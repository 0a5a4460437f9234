"""The record of a sweep: a run each, and which of them are on the Pareto front of size against quality."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from attar.measure.run_folder import RunRecord, StageRecord


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        original, last: the measured model and the last measured stage, which has the run's name; None for
            a run that failed.
        message: why it failed.
        date: when it was measured, ``2026-11-27``; "" where that is not known.
    """

    name: str
    path: str
    original: StageRecord | None
    last: StageRecord | None
    message: str = ""
    date: str = ""


@dataclass(frozen=True)
class SweepRecord:
    """A sweep.

    Attributes:
        jobs: processes that shared the machine while speeds were measured.
    """

    recipe: str
    runs: tuple[SweepRun, ...]
    jobs: int = 1

    @property
    def labels(self) -> dict[str, str]:
        """What distinguishes each run's name from the others."""
        return distinctions([run.name for run in self.runs])

    @property
    def settings(self) -> list[str]:
        """The settings that the runs differ in, where their names tell."""
        values = _values([run.name for run in self.runs])
        return [key for key, _ in values[0]] if values else []

    def as_run(self) -> RunRecord | None:
        """The original and the last stage of each run by its label, as a run; None without any."""
        labels = self.labels
        original = next((run.original for run in self.runs if run.original is not None), None)
        last = [replace(run.last, name=labels[run.name]) for run in self.runs if run.last is not None]
        date = max(run.date for run in self.runs) if self.runs else ""
        return RunRecord((original, *last), date=date) if original is not None and last else None

    def to_dict(self) -> dict[str, Any]:
        """JSON content."""
        front = pareto_front([run.last for run in self.runs if run.last is not None])
        return {
            "recipe": self.recipe,
            "jobs": self.jobs,
            "variants": [
                {
                    "name": run.name,
                    "path": run.path,
                    "finished": run.last is not None,
                    "message": run.message,
                    "front": run.name in front,
                    "measurements": dict(run.last.measurements) if run.last else {},
                }
                for run in self.runs
            ],
        }


def sweep_run(name: str, path: str, run: RunRecord | None, message: str) -> SweepRun:
    """One run of a sweep from its record, or from the message of its failure."""
    if run is None:
        return SweepRun(name, path, None, None, message)
    last = replace(run.last, name=name, parents=())
    return SweepRun(name, path, run.original, last, date=run.date)


def distinctions(names: Sequence[str]) -> dict[str, str]:
    """Each name of a run without what all have in common: ``quantize.scheme=W3A16`` is ``W3A16`` among other
    schemes.

    Of several settings, numbers keep the setting's name: ``W3A16 group size 32``. Names of another form
    lose the words that all begin and end with. Where that leaves two alike, or nothing, names stay.
    """
    if len(names) < 2:
        return {name: name for name in names}
    values = _values(names)
    labels = [_settings_label(row) for row in values] if values else _without_common(names)
    distinct = all(labels) and len(set(labels)) == len(names)
    return dict(zip(names, labels if distinct else names, strict=True))


def _values(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Settings and values of each name, the same settings in all; none for names of another form."""
    rows = [[part.partition("=")[::2] for part in name.split("+")] for name in names]
    keys = [[key for key, _ in row] for row in rows]
    known = all(row == keys[0] for row in keys) and all(value for row in rows for _, value in row)
    return rows if known else []


def _settings_label(parts: Sequence[tuple[str, str]]) -> str:
    ends = [key.rpartition(".")[2] for key, _ in parts]
    words = []
    for (key, value), end in zip(parts, ends, strict=True):
        name = end if ends.count(end) == 1 else key
        plain = len(parts) == 1 or (value.isidentifier() and value not in ("true", "false", "none"))
        words.append(value if plain and ends.count(end) == 1 else f"{name.replace('_', ' ')} {value}")
    return " ".join(words)


def _without_common(names: Sequence[str]) -> list[str]:
    """Names without the words at the beginning and the end that all of them have."""
    words = [re.findall(r"[^=+.,_-]+|[=+.,_-]", name) for name in names]
    first, last = _common(words), _common([row[::-1] for row in words])
    return ["".join(row[first : len(row) - last]).strip("=+.,_-") for row in words]


def _common(rows: Sequence[Sequence[str]]) -> int:
    """How many words all rows begin with."""
    columns = zip(*rows, strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def pareto_front(stages: Sequence[StageRecord]) -> list[str]:
    """Names of the stages that no other one beats: none is as small and as good, and better in one of both.

    Quality is the KL to the original, or the perplexity where nobody has a KL; smallest first. A larger stage
    whose KL is not told apart from a smaller one's is no better; of the same size both stay.
    """
    key = quality_key(stages)
    known = [
        (size, quality, stage.name, stage)
        for stage in stages
        if (size := stage.number("bytes")) is not None and (quality := stage.number(key)) is not None
    ]
    front: list[str] = []
    best: tuple[float, float, str, StageRecord] | None = None
    for row in sorted(known, key=lambda row: row[:3]):
        size, quality, name, stage = row
        apart = best is None or (stage.kl_differs(best[3]) if key == "kl_mean" else quality != best[1])
        better = best is None or (apart and quality < best[1])
        if better or (best is not None and not apart and size == best[0]):
            front.append(name)
        best = row if better else best
    return front


def quality_key(stages: Sequence[StageRecord]) -> str:
    """The measurement that stands for quality, lower is better."""
    return "kl_mean" if any(stage.number("kl_mean") is not None for stage in stages) else "perplexity"
