"""The plan of a run: the state of every stage (done, resumable, changed, new), and estimates.

A step's key is a hash of its verb, code version, settings, data and the keys of its inputs, down to the
fingerprint of the original model. Equal keys mean equal bytes, so a step whose receipt has its key is done.
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
from attar.memory import free_memory
from attar.progress import SILENT, Progress
from attar.recipe.estimate import Estimate, estimate, evaluation_memory, evaluation_seconds
from attar.recipe.machine import Rates, measure_rates
from attar.recipe.runfolder import ORIGINAL_RECEIPT, Receipt, read_receipt
from attar.recipe.schema import ORIGINAL, Recipe, StageEntry
from attar.recipe.settings import plain
from attar.recipe.shapes import Shape, after, shape_of
from attar.recipe.stages import EVALUATE_VERSION, STAGES, load

DONE, HALF, CHANGED, NEW = "done", "goes on", "changed", "new"
"""States of a step: finished; interrupted and resumable; finished with other settings; never started."""


@dataclass(frozen=True)
class RecipeStep:
    """One stage of a plan.

    Args:
        state: :data:`DONE`, :data:`HALF`, :data:`CHANGED` or :data:`NEW`.
        estimate: of time, memory and disk.
        evaluation_key: identity of its evaluation; empty without evaluation.
        evaluated: whether its measurements exist.
        evaluation_seconds: estimated time of its evaluation, 0 if it is not needed.
        evaluation_memory: estimated bytes of it, 0 if it is not needed.
    """

    entry: StageEntry
    folder: Path
    key: str
    state: str
    estimate: Estimate
    evaluation_key: str
    evaluated: bool
    evaluation_seconds: float
    evaluation_memory: float

    @property
    def seconds(self) -> float:
        """Estimated remaining time, evaluation included."""
        return (0.0 if self.state == DONE else self.estimate.seconds) + self.evaluation_seconds

    @property
    def memory_bytes(self) -> float:
        """Estimated memory of what remains, evaluation included."""
        return max(0.0 if self.state == DONE else self.estimate.memory_bytes, self.evaluation_memory)


@dataclass(frozen=True)
class RecipePlan:
    """All steps of a run.

    Args:
        original_key: its fingerprint.
        original_evaluation_key: identity of its evaluation; empty without evaluation.
        original_seconds: estimated time of its evaluation, 0 if it is done.
        original_memory: estimated bytes of it and of the reference, 0 if it is done.
    """

    recipe: Recipe
    out: Path
    original: Checkpoint
    original_key: str
    original_evaluation_key: str
    original_seconds: float
    original_memory: float
    steps: tuple[RecipeStep, ...]

    @property
    def seconds(self) -> float:
        """Estimated remaining time of the run."""
        return self.original_seconds + sum(step.seconds for step in self.steps)

    def folder_of(self, name: str) -> Path:
        """The folder of a stage's checkpoint, or of the original."""
        if name == ORIGINAL:
            return self.original.path
        return self.step(name).folder

    def step(self, name: str) -> RecipeStep:
        """The step of a stage's name."""
        return next(step for step in self.steps if step.entry.name == name)


def make_plan(recipe: Recipe, out: Path, original: Checkpoint, *, fresh: bool = False) -> RecipePlan:
    """Compare a recipe with the run's folder ``out``, which need not exist.

    Raises:
        AttarError: the data cannot be read.
    """
    recipe = fitted(recipe, original)
    receipts = {} if fresh else _receipts(recipe, out)
    return _RecipePlanner(recipe, out, original, receipts, fresh).plan()


def fitted(recipe: Recipe, original: Checkpoint, progress: Progress = SILENT) -> Recipe:
    """The recipe with ``data: auto`` replaced by the text that fits its model; logs the choice."""

    def fit_one(settings: Any) -> Any:
        return fit(settings, original) if hasattr(settings, "data") else settings  # evaluate may be None

    settings = [recipe.evaluate, *(entry.settings for entry in recipe.stages)]
    for data in dict.fromkeys(item.data for item in settings if hasattr(item, "data")):
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
            shapes[entry.name] = result = after(entry, source)
            needs = estimate(entry, source, teacher, result, rates, _factor(errors, entry))
            state = self._state(entry, keys[entry.name])
            evaluation = self._evaluation_key(keys[entry.name], root, data) if entry.makes_model else ""
            evaluated = state == DONE and self._evaluated(entry.folder, evaluation)
            missing = bool(evaluation) and not evaluated
            seconds = self._evaluation_seconds(result, rates) if missing else 0.0
            memory = self._evaluation_memory(result) if missing else 0.0
            folder = self.out / entry.folder
            key = keys[entry.name]
            steps.append(RecipeStep(entry, folder, key, state, needs, evaluation, evaluated, seconds, memory))
        evaluation = self._evaluation_key(root, root, data)
        needed = evaluation and not self._evaluated(ORIGINAL_RECEIPT, evaluation)
        seconds = self._evaluation_seconds(shapes[ORIGINAL], rates) if needed else 0.0
        memory = self._evaluation_memory(shapes[ORIGINAL], reference=True) if needed else 0.0
        return RecipePlan(
            self.recipe, self.out, self.original, root, evaluation, seconds, memory, tuple(steps)
        )

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

    def _evaluation_memory(self, shape: Shape, *, reference: bool = False) -> float:
        return evaluation_memory(self.recipe.evaluate, shape, free_memory(), reference=reference)

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
            return DONE  # killed between the rename of the checkpoint and its receipt
        if _work_key(folder) == key:
            return HALF
        return CHANGED if folder.exists() else NEW


def _receipts(recipe: Recipe, out: Path) -> dict[str, Receipt]:
    names = [ORIGINAL_RECEIPT, *(entry.folder for entry in recipe.stages)]
    receipts = {name: read_receipt(out, name) for name in names}
    return {name: receipt for name, receipt in receipts.items() if receipt is not None}


def error_factor(recipe: Recipe, out: Path, entry: StageEntry) -> float:
    """The :func:`_factor` of the finished stages in a run's folder."""
    return _factor(_errors(recipe, _receipts(recipe, out)), entry)


def _errors(recipe: Recipe, receipts: Mapping[str, Receipt]) -> dict[str, list[float]]:
    """Time over estimate of the finished stages, by kind; under ``""`` of all."""
    errors: dict[str, list[float]] = {}
    for entry in recipe.stages:
        receipt = receipts.get(entry.folder)
        if receipt and receipt.finished and receipt.estimated > 0 and receipt.seconds > 0:
            for kind in (_kind(entry), ""):
                errors.setdefault(kind, []).append(receipt.seconds / receipt.estimated)
    return errors


def _kind(entry: StageEntry) -> str:
    return f"{entry.stage} {getattr(entry.settings, 'method', '')}"


def _factor(errors: Mapping[str, list[float]], entry: StageEntry) -> float:
    """The correction of an estimate: the median error of the same verb and method, else of all stages."""
    return median(errors.get(_kind(entry)) or errors.get("") or [1.0])


def _data(settings: Any, known: dict[str, str]) -> list[str]:
    """The fingerprint of the text that a stage reads: an edited file changes the stage's key."""
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
    """The key of the interrupted work of a folder."""
    try:
        return str(read_json(hidden(folder, "work") / "key.json").get("key"))
    except CheckpointError:
        return None
