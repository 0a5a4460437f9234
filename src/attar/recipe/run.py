"""Run a recipe: make missing checkpoints, resume interrupted ones, measure each, write receipts and report.

    RUN/recipe.yaml          the recipe with all defaults
    RUN/run.json             stages and measurements so far, rewritten after each stage
    RUN/01-distill/ ...      one checkpoint per stage
    RUN/receipts/*.json      one receipt per stage
    RUN/.signal/ ...         a teacher's stored predictions, which stages share; removed at the end
    RUN/report.html          at the end

A stage's work is either complete under its final name or in its own work folder, so a run that is killed at
any moment is resumed by the same command.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attar.checkpoint.atomic import write_bytes
from attar.checkpoint.card import Card, versions
from attar.checkpoint.card import plain as jsonable
from attar.checkpoint.open import open_checkpoint
from attar.checkpoint.output import finished
from attar.checkpoint.readme import FILE as README
from attar.checkpoint.readme import with_new_readme
from attar.checkpoint.units import range_text
from attar.errors import AttarError, OutputError, RecipeError, SettingsError
from attar.progress import SILENT, Progress
from attar.recipe.history import kind_of, read_history
from attar.recipe.machine import PACKAGES
from attar.recipe.plan import DONE, HALF, RecipePlan, RecipeStep, fitted, make_plan
from attar.recipe.plan_history import append_record, outcome_line
from attar.recipe.run_json import entries, write_run
from attar.recipe.runfolder import (
    ORIGINAL_RECEIPT,
    RECIPE,
    REPORT,
    SIGNAL,
    Receipt,
    check_folder,
    locked,
    missing_folders,
    own_folders,
    read_receipt,
    remove_own,
    sizes,
    undo,
    write_receipt,
)
from attar.recipe.schema import ORIGINAL, Recipe
from attar.recipe.show import plan_text
from attar.recipe.stages import STAGES, load
from attar.settings import plain
from attar.tracking.track import stage_run, untracked

if TYPE_CHECKING:
    import pandas

    from attar.measure.run_folder import RunRecord as RunRecord


@dataclass(frozen=True)
class Tools:
    """The functions of ``measure`` that a run calls, by import path, so that a plan imports none of them."""

    evaluate: str = "attar.measure.evaluate:evaluate"
    make_reference: str = "attar.measure.evaluate:prepare_reference"
    report: str = "attar.measure.report.page:write_report"
    reset_peak: str = "attar.measure.footprint:reset_peak"
    peak: str = "attar.memory:peak_rss_bytes"


@dataclass(frozen=True, repr=False)
class RunResult:
    """A finished run: its folder, and the content of ``run.json``."""

    path: Path
    content: dict[str, Any]

    @property
    def report(self) -> Path:
        """The path of the report."""
        return self.path / REPORT

    @property
    def run(self) -> RunRecord:
        """The run as a record of ``measure``."""
        from attar.measure.run_folder import run_from_dict

        return run_from_dict(self.content, self.path)

    def table(self) -> str:
        """The results, a row per stage."""
        from attar.measure.table import plain_table

        return plain_table(self.run)

    def verdict(self) -> str:
        """One line about the last checkpoint: how much smaller, how much quality is kept."""
        from attar.measure.verdict import verdict

        return verdict(self.run)

    def findings(self) -> list[str]:
        """Sentences: the gain by recovery, and of one method over another."""
        from attar.measure.verdict import findings

        return findings(self.run)

    def outcome(self) -> str:
        """Of a plan, a line: what was predicted and measured; empty for other recipes."""
        recipe = self.content["recipe"]
        return outcome_line(recipe.get("predicted", {}), recipe.get("measured", {}))

    def to_frame(self) -> pandas.DataFrame:
        """The measurements, a row per stage."""
        from attar.measure.notebook import run_frame

        return run_frame(self.run)

    def __repr__(self) -> str:
        return f"RunResult({str(self.path)!r}: {self.verdict()})"

    def _repr_html_(self) -> str:
        from attar.measure.notebook import run_html

        return run_html(self.run)

    def to_dict(self) -> dict[str, Any]:
        """``run.json`` with the paths of the run and of its report."""
        return {"path": str(self.path), "report": str(self.report), "verdict": self.verdict()} | self.content


def run_recipe(
    recipe: Recipe, out: Path, *, fresh: bool = False, progress: Progress = SILENT, tools: Tools | None = None
) -> RunResult:
    """Run a recipe in the folder ``out``, or resume an earlier run.

    Args:
        fresh: remove the files of an earlier run, and start over.
        tools: functions that measure and report; None: those of ``measure``.

    Raises:
        AttarError: an error in the model, the data or a stage; finished stages stay.
        OutputError: the folder holds other files, or another run uses it.
    """
    original = open_checkpoint(recipe.model)
    check_folder(out, recipe.model, fresh=fresh)
    created = missing_folders(out)
    with locked(out):
        if fresh:
            remove_own(out)
        try:
            plan = make_plan(fitted(recipe, original, progress), out, original)
            check_foreign(plan)
            progress.log(plan_text(plan))
            return RecipeRun(plan, progress, tools or Tools()).run()
        except AttarError:
            undo(out, created)
            raise


def check_foreign(plan: RecipePlan) -> None:
    """Refuse to replace a folder that is not of this run."""
    step_folders = own_folders(plan.out)
    for step in plan.steps:
        if step.folder.exists() and step.state != DONE and step.folder.name not in step_folders:
            hint = "choose another folder with -o"
            raise OutputError(f"{step.folder}: exists, but this run did not make it", hint=hint)


IMATRIX = "imatrix.gguf"  # beside a GGUF file: no weights


def with_measured(plan: RecipePlan) -> RecipePlan:
    """A finished plan whose recipe has ``measured``, of its last model; it is added to the history of plans.

    Raises:
        OutputError: the history cannot be written.
    """
    recipe = plan.recipe
    last = next((step for step in reversed(plan.steps) if step.entry.makes_model), None)
    receipt = read_receipt(plan.out, last.folder.name) if last else None
    if last is None or receipt is None:
        return plan
    weights = (*last.folder.glob("*.safetensors"), *last.folder.glob("*.gguf"))
    files = sum(path.stat().st_size for path in weights if path.name != IMATRIX)
    values = {"bytes": files, "kl": receipt.measurements.get("kl_mean")}
    values["decode_tokens_per_s"] = receipt.measurements.get("decode_tokens_per_s")
    measured = {name: value for name, value in values.items() if value is not None}
    method = str(getattr(last.entry.settings, "method", ""))
    append_record(plan.original_key, recipe.model, last.key, method, recipe.predicted, measured)
    return replace(plan, recipe=replace(recipe, measured=measured))


@dataclass
class RecipeRun:
    """One call of :func:`run_recipe`, or a part of it on a worker.

    Args:
        signal: folder of teachers' stored predictions, in the run's.
    """

    plan: RecipePlan
    progress: Progress
    tools: Tools
    reference: Any = None
    signal: str = SIGNAL

    def run(self) -> RunResult:
        self.begin()
        self.make_and_measure(ORIGINAL)
        for count, step in enumerate(self.plan.steps, 1):
            self.make_and_measure(step.entry.name)
            write_run(self.plan, versions(PACKAGES), entries(self.plan, count), finished=False)
        return self.finish()

    def begin(self) -> None:
        """Write the recipe, and list the folders as the run's own."""
        write_run(self.plan, versions(PACKAGES), entries(self.plan, 0), finished=False)
        write_bytes(self.plan.out / RECIPE, self.plan.recipe.to_yaml().encode())

    def make_and_measure(self, name: str) -> None:
        """Make and measure the checkpoint of a stage, whose inputs are there; measure the original."""
        plan = self.plan
        if name == ORIGINAL:
            with self.tracked(ORIGINAL_RECEIPT, "evaluate", {"model": plan.recipe.model}, plan.original_key):
                evaluation_key = plan.original_evaluation_key
                estimated = plan.original_time.plain
                self.evaluate(
                    ORIGINAL_RECEIPT, plan.recipe.model, plan.original_key, evaluation_key, estimated
                )
            return
        step = plan.step(name)
        inputs = {"model": plan.recipe.model, "source": step.entry.source, "teacher": step.entry.teacher}
        with self.tracked(step.folder.name, step.entry.stage, inputs | plain(step.entry.settings), step.key):
            self.make(step)
            self.evaluate(
                step.folder.name, step.folder, step.key, step.evaluation_key, step.evaluation_time.plain
            )

    @contextmanager
    def tracked(self, name: str, verb: str, settings: dict[str, Any], key: str) -> Iterator[None]:
        """Within it a stage's receipt changes; trackers get what it has then."""
        out = self.plan.out
        before = read_receipt(out, name)
        with stage_run(
            self.progress, verb, settings, out / name, group=out.absolute().name, key=key
        ) as finish:
            yield
            receipt = read_receipt(out, name)
            if receipt is not None and receipt != before:
                work = {"seconds": receipt.seconds, "peak_rss_bytes": receipt.peak_rss_bytes}
                finish({**receipt.measurements, **(work if receipt.finished else {})})

    def finish(self) -> RunResult:
        """Write ``run.json`` and the report of a run whose stages are all done."""
        plan = self.plan
        shutil.rmtree(plan.out / SIGNAL, ignore_errors=True)
        if plan.recipe.predicted:
            self.plan = plan = with_measured(plan)
            write_bytes(plan.out / RECIPE, plan.recipe.to_yaml().encode())
        content = write_run(plan, versions(PACKAGES), entries(plan, len(plan.steps)), finished=True)
        load(self.tools.report)(plan.out)
        return RunResult(plan.out, content)

    def make(self, step: RecipeStep) -> None:
        """Run the stage of a step unless its checkpoint is finished; write its receipt."""
        name, kind = step.folder.name, kind_of(step.entry.stage, step.entry.settings)
        receipt = read_receipt(self.plan.out, name)
        if receipt is None or receipt.key != step.key:
            # the time of a resumed stage is not comparable with its estimate
            estimated = 0.0 if step.state == HALF else step.estimate.time.plain
            receipt = Receipt(key=step.key, estimated=estimated, kind=kind)
        if step.state == DONE:
            finished(step.folder, step.key)  # removes what a kill after its end left
            self.progress.log(f"{name}: done already")
        else:
            span = (
                read_history(self.plan.out).correction(kind).span(step.estimate.time.plain)
            )  # by what is done now
            about = range_text(span.least, span.most)
            self.progress.log(f"{name}: {'goes on' if step.state == HALF else 'starts'}, about {about}")
            receipt = self.work(step, replace(receipt, finished=False, measurements_key="", measurements={}))
        if not receipt.finished:
            write_receipt(self.plan.out, name, replace(receipt, finished=True, files=sizes(step.folder)))

    def work(self, step: RecipeStep, receipt: Receipt) -> Receipt:
        """Call the stage function; an interruption keeps its time too."""
        entry = step.entry
        function, peak = STAGES[entry.stage].run(), load(self.tools.peak)
        self.release()
        load(self.tools.reset_peak)()
        start = time.monotonic()
        try:
            self.call(function, step)
        except SettingsError as error:  # a setting is wrong for this model
            raise RecipeError(f"{entry.where}: {error.message}", hint=error.hint) from error
        finally:
            seconds = receipt.seconds + time.monotonic() - start
            kept = self.reference.nbytes if self.reference is not None else 0
            receipt = replace(receipt, seconds=seconds, peak_rss_bytes=peak() - kept)
            write_receipt(self.plan.out, step.folder.name, receipt)
        return receipt

    def call(self, function: Any, step: RecipeStep) -> None:
        """Call a stage function with its models."""
        entry = step.entry
        common: dict[str, Any] = {"progress": self.progress, "force": True, "key": step.key}
        if getattr(entry.settings, "keeps_predictions", False):
            common["signal"] = self.plan.out / self.signal
        if STAGES[entry.stage].merges:
            models = {name: self.model(name) for name in entry.merged}
            function(step.folder, entry.settings, models=models, **common)
            return
        teacher = {"teacher": self.model(entry.teacher)} if entry.teacher else {}
        function(self.model(entry.source), step.folder, entry.settings, **teacher, **common)

    def model(self, name: str) -> str | Path:
        """The model of a name; the original as the recipe names it, so that cards have that name."""
        return self.plan.recipe.model if name == ORIGINAL else self.plan.folder_of(name)

    def evaluate(self, name: str, model: str | Path, key: str, evaluation_key: str, estimated: float) -> None:
        """Compare a checkpoint with the original, unless its receipt has these measurements."""
        receipt = read_receipt(self.plan.out, name) or Receipt(key=key)
        if not evaluation_key or receipt.measurements_key == evaluation_key:
            return
        measurements, seconds = self.measure(model)
        card = Card.read(model) if isinstance(model, Path) else None
        if card is not None and isinstance(model, Path):
            with_new_readme(card.with_measurements(**measurements), model / README).write(model)
        receipt = replace(receipt, key=key, measurements_key=evaluation_key, measurements=measurements)
        receipt = replace(receipt, evaluation_seconds=seconds, evaluation_estimated=estimated)
        write_receipt(self.plan.out, name, receipt)

    def measure(self, model: str | Path) -> tuple[dict[str, Any], float]:
        """Evaluate a checkpoint, and its seconds; makes the reference at the first call."""
        recipe = self.plan.recipe
        evaluate, make_reference = load(self.tools.evaluate), load(self.tools.make_reference)
        progress = untracked(self.progress)
        try:
            if self.reference is None:
                self.reference = make_reference(recipe.model, recipe.evaluate, progress=progress)
            start = time.monotonic()
            results = evaluate(model, recipe.evaluate, reference=self.reference, progress=progress)
        except SettingsError as error:
            raise RecipeError(f"{recipe.path}: in evaluate, {error.message}", hint=error.hint) from error
        measurements: dict[str, Any] = jsonable(results.to_dict())
        return measurements, time.monotonic() - start

    def release(self) -> None:
        """Free a reference that is a loaded model: the stage needs the memory."""
        if self.reference is not None and not self.reference.kept:
            self.reference = None
        gc.collect()
