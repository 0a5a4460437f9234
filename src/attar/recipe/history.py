"""Times of finished stages, by kind: what later estimates are multiplied by.

A receipt keeps its stage's kind (verb and method), its estimate by arithmetic and its time. The receipts of
this run come first, then the receipts of the runs in the folders beside it (``runs/*``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from attar.recipe.estimate import Correction
from attar.recipe.runfolder import RECEIPTS, Receipt, read_receipt

EVALUATE = "evaluate"
"""Kind of an evaluation."""

_RECEIPTS_BESIDE = 200  # of other runs, the newest
_LONGEST = 1e9  # seconds: a receipt that says more is damaged


@dataclass(frozen=True)
class History:
    """Time over estimate of finished stages, by kind, of this run and of the runs beside it."""

    here: dict[str, list[float]] = field(default_factory=dict)
    neighbours: dict[str, list[float]] = field(default_factory=dict)

    def correction(self, kind: str) -> Correction:
        """By the stages of the same kind of this run, else of others; else by all stages of this run."""
        if errors := self.here.get(kind) or self.neighbours.get(kind):
            return Correction(median(errors), 1.0)
        return Correction(median([error for errors in self.here.values() for error in errors] or [1.0]))


def kind_of(stage: str, settings: Any) -> str:
    """Kind of a stage: verb and method."""
    return f"{stage} {getattr(settings, 'method', '')}".strip()


def read_history(run: Path) -> History:
    """The history of a run's folder, which need not exist."""
    paths = (path for path in run.parent.glob(f"*/{RECEIPTS}/*.json") if path.parent.parent.name != run.name)
    newest = sorted(paths, key=_changed, reverse=True)[:_RECEIPTS_BESIDE]
    return History(_errors((run / RECEIPTS).glob("*.json")), _errors(newest))


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _errors(paths: Iterable[Path]) -> dict[str, list[float]]:
    receipts = [read_receipt(path.parent.parent, path.stem) for path in sorted(paths)]
    errors: dict[str, list[float]] = {}
    for receipt in receipts:
        for kind, error in _times(receipt) if receipt else ():
            errors.setdefault(kind, []).append(error)
    return errors


def _times(receipt: Receipt) -> list[tuple[str, float]]:
    """Kinds and time over estimate of a stage and its evaluation."""
    stage = (receipt.kind, receipt.seconds, receipt.estimated)
    evaluation = (EVALUATE, receipt.evaluation_seconds, receipt.evaluation_estimated)
    pairs = [stage, evaluation] if receipt.finished and receipt.kind else [evaluation]
    return [
        (kind, seconds / estimated)
        for kind, seconds, estimated in pairs
        if 0 < seconds < _LONGEST and 0 < estimated < _LONGEST
    ]
