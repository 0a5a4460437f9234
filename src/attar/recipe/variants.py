"""Runs whose stages are tasks: several variants of a recipe, or one recipe on a cluster.

A stage's key says what it makes, so stages with equal keys are made once, in the folder of the first run that
has them; the other runs get links to its files. The driver holds the lock of every run and writes run.json;
a worker writes its stage's checkpoint, which appears under its name by a rename, and its receipt.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from attar.checkpoint import atomic
from attar.checkpoint.card import versions
from attar.checkpoint.open import open_checkpoint
from attar.cluster.journal import FILE as JOURNAL
from attar.cluster.journal import TaskJournal
from attar.cluster.settings import ClusterSettings
from attar.cluster.tasks import DONE as ENDED
from attar.cluster.tasks import ClusterTask, Resources, TaskOutcome, Workers, run_tasks
from attar.cluster.workers import workers_of
from attar.errors import AttarError, RecipeError
from attar.progress import SILENT, Progress
from attar.recipe.machine import PACKAGES
from attar.recipe.plan import DONE, RecipePlan, RecipeStep, fitted, make_plan
from attar.recipe.run import RecipeRun, RunResult, Tools, check_foreign
from attar.recipe.run_json import entries, write_run
from attar.recipe.runfolder import (
    ORIGINAL_RECEIPT,
    Receipt,
    check_folder,
    locked,
    read_receipt,
    remove_own,
    write_receipt,
)
from attar.recipe.schema import ORIGINAL, Recipe
from attar.recipe.step_task import FUNCTION, arguments
from attar.tracking.track import TrackedProgress


@dataclass(frozen=True)
class RunVariant:
    """A run to make: its name among the others ("" for a single one), its recipe and its folder."""

    name: str
    recipe: Recipe
    out: Path


@dataclass(frozen=True)
class PlannedRun:
    """A variant and its plan."""

    variant: RunVariant
    plan: RecipePlan

    def task(self, stage: str) -> str:
        """The id of the task that makes a stage in this run."""
        folder = ORIGINAL_RECEIPT if stage == ORIGINAL else self.plan.step(stage).folder.name
        return f"{self.variant.name}/{folder}" if self.variant.name else folder


@dataclass(frozen=True)
class VariantResult:
    """The end of a run: its result, or a message."""

    name: str
    result: RunResult | None
    message: str = ""


def run_variants(
    variants: Sequence[RunVariant],
    settings: ClusterSettings,
    journal: Path,
    *,
    fresh: bool = False,
    workers: Workers | None = None,
    tools: Tools | None = None,
    progress: Progress = SILENT,
) -> list[VariantResult]:
    """Run recipes with their stages as tasks, or go on with them; a failed run does not end the others.

    Args:
        journal: folder of the driver's journal.
        workers: None: those of ``settings``.
        tools: for the report.

    Raises:
        AttarError: a plan cannot be made, or a folder is in use or holds other files.
    """
    if isinstance(progress, TrackedProgress):
        progress.check_names_only()
    for variant in variants:
        check_folder(variant.out, variant.recipe.model, fresh=fresh)
    with ExitStack() as stack:
        runs = []
        for variant in variants:
            stack.enter_context(locked(variant.out))
            if fresh:
                remove_own(variant.out)
            runs.append(_planned(variant, progress))
        for run in runs:
            RecipeRun(run.plan, progress, tools or Tools()).begin()
        tasks = tasks_of(runs, settings.resources, progress, journal.absolute().name)
        outcomes: dict[str, TaskOutcome] = {}
        if tasks:
            lines = TaskJournal(journal / JOURNAL)
            stack.callback(lines.close)
            workers = workers or workers_of(settings)
            stack.callback(workers.close)
            by_task = {run.task(stage): (run, stage) for run in runs for stage in _stages(run)}

            def bring_inputs(task: ClusterTask) -> None:
                run, stage = by_task[task.id]
                adopt(run.plan, [*_parents(run.plan, stage), stage], [other.plan for other in runs])

            outcomes = run_tasks(tasks, workers, lines, before=bring_inputs, progress=progress)
        return [_finish(run, runs, outcomes, progress, tools or Tools()) for run in runs]


def run_on_cluster(
    recipe: Recipe,
    out: Path,
    settings: ClusterSettings,
    *,
    fresh: bool = False,
    workers: Workers | None = None,
    tools: Tools | None = None,
    progress: Progress = SILENT,
) -> RunResult:
    """One recipe with its stages as tasks: those that do not need each other run side by side.

    Raises:
        RecipeError: a stage failed; those that did not need it are done.
        AttarError: as :func:`run_variants`.
    """
    variant = RunVariant("", recipe, out)
    out.mkdir(parents=True, exist_ok=True)
    (end,) = run_variants(
        [variant], settings, out, fresh=fresh, workers=workers, tools=tools, progress=progress
    )
    if end.result is None:
        raise RecipeError(end.message, hint="the same command goes on with what is missing")
    return end.result


def _planned(variant: RunVariant, progress: Progress) -> PlannedRun:
    original = open_checkpoint(variant.recipe.model)
    plan = make_plan(fitted(variant.recipe, original, progress), variant.out, original)
    check_foreign(plan)
    return PlannedRun(variant, plan)


def tasks_of(
    runs: Sequence[PlannedRun], resources: Resources, progress: Progress, group: str
) -> list[ClusterTask]:
    """A task for each stage that is not done and measured in any run, the first time that its key occurs.

    A stage that is measured in another way than an equal one comes after it, and measures alone.

    Args:
        group: of the runs where they are tracked.
    """
    done = {identity for run in runs for identity in _done(run)}
    first: dict[tuple[str, str], str] = {}
    makers: dict[str, str] = {}
    tasks: list[ClusterTask] = []
    for run in runs:
        shared = group if run.variant.name else ""
        for stage in _stages(run):
            identity = _identity(run.plan, stage)
            if identity in done or identity in first:
                continue
            parents = [parent for parent in _parents(run.plan, stage) if parent != ORIGINAL]
            needs = [first[key] for parent in parents if (key := _identity(run.plan, parent)) in first]
            needs += [makers[identity[0]]] if identity[0] in makers and stage != ORIGINAL else []
            first[identity] = name = run.task(stage)
            makers.setdefault(identity[0], name)
            needed = tuple(dict.fromkeys(needs))
            tasks.append(
                ClusterTask(name, FUNCTION, arguments(run.plan, stage, progress, shared), needed, resources)
            )
    return tasks


def _stages(run: PlannedRun) -> list[str]:
    """What a run makes and measures: the original where that is measured, and its stages."""
    original = [ORIGINAL] if run.plan.original_evaluation_key else []
    return [*original, *(step.entry.name for step in run.plan.steps)]


def _parents(plan: RecipePlan, stage: str) -> tuple[str, ...]:
    return () if stage == ORIGINAL else plan.recipe.entry(stage).parents


def _identity(plan: RecipePlan, stage: str) -> tuple[str, str]:
    """What a task makes: the stage's key and that of its evaluation."""
    if stage == ORIGINAL:
        return plan.original_key, plan.original_evaluation_key
    step = plan.step(stage)
    return step.key, step.evaluation_key


def _done(run: PlannedRun) -> Iterable[tuple[str, str]]:
    plan = run.plan
    if plan.original_evaluation_key and not plan.original_time.seconds:
        yield plan.original_key, plan.original_evaluation_key
    for step in plan.steps:
        receipt = read_receipt(plan.out, step.folder.name)
        finished = step.state == DONE and receipt is not None and receipt.finished
        if finished and (step.evaluated or not step.evaluation_key):
            yield step.key, step.evaluation_key


def adopt(plan: RecipePlan, stages: Sequence[str], others: Sequence[RecipePlan]) -> None:
    """Link the checkpoints of stages, and their measurements, from other runs that have them.

    Raises:
        OutputError: a folder cannot be written.
    """
    for stage in stages:
        if stage == ORIGINAL:
            _adopt_original(plan, others)
            continue
        step = plan.step(stage)
        if _receipt(plan, step) is None or _measured(plan, step) is None:
            donors = [(other, same) for other in others for same in other.steps if same.key == step.key]
            donors.sort(
                key=lambda donor: _measured(*donor) is None or donor[1].evaluation_key != step.evaluation_key
            )
            donor = next((donor for donor in donors if _receipt(*donor) is not None), None)
            if donor is not None and donor[1].folder != step.folder:
                _link(plan, step, *donor)


def _receipt(plan: RecipePlan, step: RecipeStep) -> Receipt | None:
    """The receipt of a finished checkpoint."""
    receipt = read_receipt(plan.out, step.folder.name)
    return receipt if receipt and receipt.key == step.key and receipt.holds(step.folder) else None


def _measured(plan: RecipePlan, step: RecipeStep) -> Receipt | None:
    receipt = _receipt(plan, step)
    return receipt if receipt and receipt.measurements_key == step.evaluation_key else None


def _link(plan: RecipePlan, step: RecipeStep, other: RecipePlan, donor: RecipeStep) -> None:
    receipt = _receipt(other, donor)
    assert receipt is not None
    if _receipt(plan, step) is None:
        with atomic.folder(step.folder, force=True) as folder:
            shutil.copytree(donor.folder, folder, copy_function=_link_file, dirs_exist_ok=True)
    elif _measured(other, donor) is None:
        return
    write_receipt(plan.out, step.folder.name, receipt)


def _link_file(source: str, target: str) -> None:
    """A second name of a file, which nobody changes in place; a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _adopt_original(plan: RecipePlan, others: Sequence[RecipePlan]) -> None:
    key = plan.original_evaluation_key
    for candidate in (plan, *others):
        receipt = read_receipt(candidate.out, ORIGINAL_RECEIPT)
        if key and receipt is not None and receipt.measurements_key == key:
            if candidate is not plan:
                write_receipt(plan.out, ORIGINAL_RECEIPT, receipt)
            return


def _finish(
    run: PlannedRun,
    runs: Sequence[PlannedRun],
    outcomes: dict[str, TaskOutcome],
    progress: Progress,
    tools: Tools,
) -> VariantResult:
    """Bring what other runs made, and write run.json; the report of a whole run."""
    plan = run.plan
    try:
        adopt(plan, _stages(run), [other.plan for other in runs])
        missing = [step for step in plan.steps if _missing(plan, step)]
        if not missing:
            return VariantResult(run.variant.name, RecipeRun(plan, progress, tools).finish())
        count = plan.steps.index(missing[0])
        write_run(plan, versions(PACKAGES), entries(plan, count), finished=False)
    except AttarError as error:
        return VariantResult(run.variant.name, None, error.message)
    reasons = _reasons(missing, runs, outcomes)
    return VariantResult(run.variant.name, None, reasons[0] if reasons else "not finished")


def _missing(plan: RecipePlan, step: RecipeStep) -> bool:
    unmeasured = bool(step.evaluation_key) and _measured(plan, step) is None
    return _receipt(plan, step) is None or unmeasured


def _reasons(
    missing: Sequence[RecipeStep], runs: Sequence[PlannedRun], outcomes: dict[str, TaskOutcome]
) -> list[str]:
    """Why steps have no result: the messages of the tasks with their keys, failures before what they kept."""
    keys = {step.key for step in missing}
    failed = [
        outcomes[run.task(step.entry.name)]
        for run in runs
        for step in run.plan.steps
        if step.key in keys and run.task(step.entry.name) in outcomes
    ]
    failed = [outcome for outcome in failed if outcome.state != ENDED]
    failed.sort(key=lambda outcome: outcome.state == "skipped")
    return [f"{outcome.task}: {outcome.message}" for outcome in failed]
