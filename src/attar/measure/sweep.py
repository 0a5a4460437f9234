"""The record of a sweep: a run each, and which of them are on the Pareto front of size against quality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from attar.measure.run_folder import RunRecord, StageRecord


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        original, last: the measured model and the last measured stage, which has the run's name; None for
            a run that failed.
        message: why it failed.
    """

    name: str
    path: str
    original: StageRecord | None
    last: StageRecord | None
    message: str = ""


@dataclass(frozen=True)
class SweepRecord:
    """A sweep.

    Attributes:
        jobs: processes that shared the machine while speeds were measured.
    """

    recipe: str
    runs: tuple[SweepRun, ...]
    jobs: int = 1

    def as_run(self) -> RunRecord | None:
        """The original and the last stage of each run, as a run with a stage each; None without any."""
        original = next((run.original for run in self.runs if run.original is not None), None)
        last = [run.last for run in self.runs if run.last is not None]
        return RunRecord((original, *last)) if original is not None and last else None

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
    return SweepRun(name, path, run.original, replace(run.last, name=name, parents=()))


def pareto_front(stages: Sequence[StageRecord]) -> list[str]:
    """Names of the stages that no other one beats: none is as small and as good, and better in one of both.

    Quality is the KL to the original, or the perplexity where nobody has a KL; smallest first.
    """
    key = quality_key(stages)
    known = [
        (size, quality, stage.name)
        for stage in stages
        if (size := stage.number("bytes")) is not None and (quality := stage.number(key)) is not None
    ]
    front: list[tuple[float, float, str]] = []
    for size, quality, name in sorted(known):
        if not front or quality < front[-1][1] or (size, quality) == front[-1][:2]:
            front.append((size, quality, name))
    return [name for _, _, name in front]


def quality_key(stages: Sequence[StageRecord]) -> str:
    """The measurement that stands for quality, lower is better."""
    return "kl_mean" if any(stage.number("kl_mean") is not None for stage in stages) else "perplexity"
