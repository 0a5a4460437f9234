"""The plan of a run: the state of every stage (done, resumable, changed, new), and estimates.

A step's key is a hash of its verb, code version, settings, data and the keys of its inputs, down to the
fingerprint of the original model. Equal keys mean equal bytes, so a step whose receipt has its key is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
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
from attar.recipe.estimate import Estimate, EstimatedTime, estimate, evaluation_seconds
from attar.recipe.history import EVALUATE, History, kind_of, read_history
from attar.recipe.machine import Rates, measure_rates
from attar.recipe.memory_needs import evaluation_memory
from attar.recipe.runfolder import ORIGINAL_RECEIPT, Receipt, read_receipt
from attar.recipe.schema import ORIGINAL, Recipe, StageEntry
from attar.recipe.shapes import Shape, after, shape_of
from attar.recipe.stages import EVALUATE_VERSION, STAGES, load
from attar.settings import plain

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
        evaluation_time: estimated time of its evaluation, 0 if it is not needed.
        evaluation_memory: estimated bytes of it, 0 if it is not needed.
    """

    entry: StageEntry
    folder: Path
    key: str
    state: str
    estimate: Estimate
    evaluation_key: str
    evaluated: bool
    evaluation_time: EstimatedTime
    evaluation_memory: float

    @property
    def time(self) -> EstimatedTime:
        """Estimated remaining time, evaluation included."""
        return (EstimatedTime() if self.state == DONE else self.estimate.time) + self.evaluation_time

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
        original_time: estimated time of its evaluation, 0 if it is done.
        original_memory: estimated bytes of it and of the reference, 0 if it is done.
    """

    recipe: Recipe
    out: Path
    original: Checkpoint
    original_key: str
    original_evaluation_key: str
    original_time: EstimatedTime
    original_memory: float
    steps: tuple[RecipeStep, ...]

    @property
    def time(self) -> EstimatedTime:
        """Estimated remaining time of the run."""
        return sum((step.time for step in self.steps), self.original_time)

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
        rates, history = measure_rates(), read_history(self.out)
        data: dict[str, str] = {}
        steps = []
        for entry in self.recipe.stages:
            keys[entry.name] = self._key(entry, keys, data)
            source, teacher = shapes[entry.source], shapes[entry.teacher] if entry.teacher else None
            shapes[entry.name] = result = after(entry, source)
            correction = history.correction(kind_of(entry.stage, entry.settings))
            needs = estimate(entry, source, teacher, result, rates, correction)
            state = self._state(entry, keys[entry.name])
            evaluation = self._evaluation_key(keys[entry.name], root, data) if entry.makes_model else ""
            evaluated = state == DONE and self._evaluated(entry.folder, evaluation)
            missing = bool(evaluation) and not evaluated
            span = self._evaluation_span(result, rates, history) if missing else EstimatedTime()
            memory = self._evaluation_memory(result) if missing else 0.0
            folder = self.out / entry.folder
            key = keys[entry.name]
            steps.append(RecipeStep(entry, folder, key, state, needs, evaluation, evaluated, span, memory))
        evaluation = self._evaluation_key(root, root, data)
        needed = evaluation and not self._evaluated(ORIGINAL_RECEIPT, evaluation)
        span = self._evaluation_span(shapes[ORIGINAL], rates, history) if needed else EstimatedTime()
        memory = self._evaluation_memory(shapes[ORIGINAL], reference=True) if needed else 0.0
        return RecipePlan(self.recipe, self.out, self.original, root, evaluation, span, memory, tuple(steps))

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

    def _evaluation_span(self, shape: Shape, rates: Rates, history: History) -> EstimatedTime:
        assert self.recipe.evaluate is not None
        return history.correction(EVALUATE).span(evaluation_seconds(self.recipe.evaluate, shape, rates))

    def _evaluation_memory(self, shape: Shape, *, reference: bool = False) -> float:
        assert self.recipe.evaluate is not None
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
