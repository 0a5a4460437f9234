"""What a run will do: which stages are done, which go on, which start; and about what they will need.

A step's key is a hash of its verb, code version, settings, data and the keys of what it reads, up to the
fingerprint of the original model. Equal key, equal bytes: so a step whose receipt has its key is done,
whatever happened around it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from attar.checkpoint.atomic import hidden
from attar.checkpoint.card import Card
from attar.checkpoint.hashing import identity
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.open import Checkpoint
from attar.data.auto import fit
from attar.data.sources import fingerprint
from attar.errors import CheckpointError
from attar.progress import SILENT, Progress
from attar.recipe.estimate import Estimate, Shape, after, estimate, evaluation_seconds, shape_of
from attar.recipe.machine import Rates, measure_rates
from attar.recipe.runfolder import ORIGINAL_RECEIPT, Receipt, read_receipt
from attar.recipe.schema import ORIGINAL, Recipe, StageEntry
from attar.recipe.settings import plain
from attar.recipe.stages import EVALUATE_VERSION, STAGES, load

DONE, HALF, CHANGED, NEW = "done", "goes on", "changed", "new"
"""States of a step: done; interrupted and resumable; done with other settings; never done."""


@dataclass(frozen=True)
class RecipeStep:
    """One stage of a plan.

    Args:
        entry: the stage and its settings.
        folder: where its checkpoint stands or will stand.
        key: identity of its work.
        state: ``done``, ``goes on``, ``changed`` or ``new``.
        estimate: about what it needs.
        evaluation_key: identity of its evaluation; empty where the recipe has none.
        evaluated: whether the measurements are there already.
        evaluation_seconds: about how long the evaluation takes, 0 where it is not needed.
    """

    entry: StageEntry
    folder: Path
    key: str
    state: str
    estimate: Estimate
    evaluation_key: str
    evaluated: bool
    evaluation_seconds: float

    @property
    def seconds(self) -> float:
        """About how long it still takes, evaluation included."""
        return (0.0 if self.state == DONE else self.estimate.seconds) + self.evaluation_seconds


@dataclass(frozen=True)
class RecipePlan:
    """All steps of a run.

    Args:
        original: the model the recipe starts from.
        original_key: its fingerprint.
        original_evaluation_key: identity of its evaluation; empty where the recipe has none.
        original_seconds: about how long its evaluation takes, 0 where it is done.
    """

    recipe: Recipe
    out: Path
    original: Checkpoint
    original_key: str
    original_evaluation_key: str
    original_seconds: float
    steps: tuple[RecipeStep, ...]

    @property
    def seconds(self) -> float:
        """About how long the run still takes."""
        return self.original_seconds + sum(step.seconds for step in self.steps)

    def folder_of(self, name: str) -> Path:
        """The folder of a stage's checkpoint, or of the original."""
        if name == ORIGINAL:
            return self.original.path
        return next(step.folder for step in self.steps if step.entry.name == name)


def make_plan(recipe: Recipe, out: Path, original: Checkpoint, *, fresh: bool = False) -> RecipePlan:
    """Decide what is to be done.

    Args:
        recipe: the recipe.
        out: the run's folder; need not exist.
        original: the recipe's model, opened.
        fresh: plan as if nothing had been done.

    Raises:
        AttarError: the data cannot be read.
    """
    recipe = fitted(recipe, original)
    receipts = {} if fresh else _receipts(recipe, out)
    return _RecipePlanner(recipe, out, original, receipts, fresh).plan()


def fitted(recipe: Recipe, original: Checkpoint, progress: Progress = SILENT) -> Recipe:
    """The recipe with the text that fits its model wherever it says ``auto``; what was chosen is told."""

    def fit_one(settings: Any) -> Any:
        return fit(settings, original) if hasattr(settings, "data") else settings  # evaluate may be None

    every = [recipe.evaluate, *(entry.settings for entry in recipe.stages)]
    for data in dict.fromkeys(each.data for each in every if hasattr(each, "data")):
        fit(replace(recipe, data=data), original, progress)
    stages = tuple(replace(entry, settings=fit_one(entry.settings)) for entry in recipe.stages)
    return replace(fit(recipe, original), evaluate=fit_one(recipe.evaluate), stages=stages)


@dataclass
class _RecipePlanner:
    recipe: Recipe
    out: Path
    original: Checkpoint
    receipts: Mapping[str, Receipt]
    fresh: bool

    def plan(self) -> RecipePlan:
        root = self.original.fingerprint()
        keys, shapes = {ORIGINAL: root}, {ORIGINAL: shape_of(self.original)}
        rates, errors = measure_rates(), _errors(self.recipe, self.receipts)
        data: dict[str, str] = {}
        steps = []
        for entry in self.recipe.stages:
            keys[entry.name] = self._key(entry, keys, data)
            source, teacher = shapes[entry.source], shapes[entry.teacher] if entry.teacher else None
            shapes[entry.name] = made = after(entry, source)
            needs = estimate(entry, source, teacher, made, rates, _factor(errors, entry))
            state = self._state(entry, keys[entry.name])
            evaluation = self._evaluation_key(keys[entry.name], root, data)
            evaluated = state == DONE and self._evaluated(entry.folder, evaluation)
            seconds = 0.0 if evaluated or not evaluation else self._evaluation_seconds(made, rates)
            folder = self.out / entry.folder
            steps.append(
                RecipeStep(entry, folder, keys[entry.name], state, needs, evaluation, evaluated, seconds)
            )
        evaluation = self._evaluation_key(root, root, data)
        needed = evaluation and not self._evaluated(ORIGINAL_RECEIPT, evaluation)
        seconds = self._evaluation_seconds(shapes[ORIGINAL], rates) if needed else 0.0
        return RecipePlan(self.recipe, self.out, self.original, root, evaluation, seconds, tuple(steps))

    def _key(self, entry: StageEntry, keys: Mapping[str, str], data: dict[str, str]) -> str:
        parents = [keys[name] for name in entry.parents]
        stage = STAGES[entry.stage]
        if stage.merges:
            parents += load("attar.merging.parents:unnamed_fingerprints")(entry.settings.config, entry.merged)
        return identity(
            entry.stage, stage.version(), plain(entry.settings), parents + _data(entry.settings, data)
        )

    def _evaluation_key(self, key: str, root: str, data: dict[str, str]) -> str:
        settings = self.recipe.evaluate
        if settings is None:
            return ""
        version = int(load(EVALUATE_VERSION))
        return identity("evaluate", version, plain(settings), [key, root, *_data(settings, data)])

    def _evaluation_seconds(self, shape: Shape, rates: Rates) -> float:
        return evaluation_seconds(self.recipe.evaluate, shape, rates)

    def _evaluated(self, name: str, key: str) -> bool:
        receipt = self.receipts.get(name)
        return bool(key) and receipt is not None and receipt.measurements_key == key

    def _state(self, entry: StageEntry, key: str) -> str:
        folder = self.out / entry.folder
        if self.fresh:
            return NEW
        receipt = self.receipts.get(entry.folder)
        if receipt is not None and receipt.key == key and receipt.holds(folder):
            return DONE
        if (receipt is None or not receipt.finished) and _card_key(folder) == key:
            return DONE  # killed between the checkpoint's last rename and its receipt
        if _work_key(folder) == key:
            return HALF
        return CHANGED if folder.exists() else NEW


def _receipts(recipe: Recipe, out: Path) -> dict[str, Receipt]:
    names = [ORIGINAL_RECEIPT, *(entry.folder for entry in recipe.stages)]
    found = {name: read_receipt(out, name) for name in names}
    return {name: receipt for name, receipt in found.items() if receipt is not None}


def error_factor(recipe: Recipe, out: Path, entry: StageEntry, *, without: str = "") -> float:
    """Time over estimate of the stages done in a run's folder, see :func:`_factor`; one may be left out."""
    receipts = _receipts(recipe, out)
    receipts.pop(without, None)
    return _factor(_errors(recipe, receipts), entry)


def _errors(recipe: Recipe, receipts: Mapping[str, Receipt]) -> dict[str, list[float]]:
    """Time over estimate of what was done here, by kind of stage, and under ``""`` of all."""
    found: dict[str, list[float]] = {}
    for entry in recipe.stages:
        receipt = receipts.get(entry.folder)
        if receipt and receipt.finished and receipt.estimated > 0 and receipt.seconds > 0:
            for kind in (_kind(entry), ""):
                found.setdefault(kind, []).append(receipt.seconds / receipt.estimated)
    return found


def _kind(entry: StageEntry) -> str:
    return f"{entry.stage} {getattr(entry.settings, 'method', '')}"


def _factor(errors: Mapping[str, list[float]], entry: StageEntry) -> float:
    """What an estimate is multiplied by: the median error of the same verb and method, else of all stages."""
    return median(errors.get(_kind(entry)) or errors.get("") or [1.0])


def _data(settings: Any, known: dict[str, str]) -> list[str]:
    """The fingerprint of the text that a stage reads, so that an edited file makes it run again."""
    name = getattr(settings, "data", None)
    if not isinstance(name, str):
        return []
    if name not in known:
        known[name] = fingerprint(name)
    return [known[name]]


def _card_key(folder: Path) -> str | None:
    try:
        card = Card.read(folder)
    except CheckpointError:
        return None
    return card.key if card else None


def _work_key(folder: Path) -> str | None:
    """The key of the half-done work beside a folder."""
    try:
        return str(read_json(hidden(folder, "work") / "key.json").get("key"))
    except CheckpointError:
        return None
