"""The method ``mixed``: heads, neurons, channels and layers together, as much of each as costs least
quality.

1. The units of every structure are ranked by the criterion; the layers, by the KL of leaving each out.
2. Each structure is cut alone by several amounts, and the KL measured (scan.py).
3. Every plan is costed exactly; the sum of the scanned KLs ranks those within the budget (plans.py).
4. The best few, and the best of each single structure, are measured as a whole; the least KL wins, or, with
   ``candidates``, the best after a short distillation (candidates.py).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from attar.checkpoint.atomic import hidden
from attar.checkpoint.hashing import canonical_json, sha256_text
from attar.checkpoint.open import open_checkpoint
from attar.checkpoint.units import bytes_text
from attar.data.auto import fit
from attar.data.sources import fingerprint
from attar.models.anatomy import discover
from attar.models.device import pick_device, resolve
from attar.models.load import load_model, load_tokenizer, save_model
from attar.models.masking import masked_units
from attar.models.stored import precision_note, stored_precision
from attar.models.surgery import cut_model
from attar.progress import SILENT, Progress
from attar.pruning.plan_budget import plan_budget
from attar.pruning.plan_costs import (
    STRUCTURES,
    PlanGrid,
    PlannedModel,
    PlanSizes,
)
from attar.pruning.plan_space import PlanSpace, UnitRanking, plan_space, planned_model
from attar.pruning.plans import plans_within, predicted_kl, shortlist
from attar.pruning.ranking import rank_units
from attar.pruning.reconstruction.units import reconstruct_units
from attar.pruning.scan import (
    CutMeasurement,
    ScanFile,
    ScanKey,
    curves,
    distance,
    even_cuts,
    layer_cuts,
    measure_cuts,
    removal_order,
    scan_table,
    to_json,
)
from attar.pruning.settings import MixedSettings, PruneSettings
from attar.pruning.task import PruneTask, calibration
from attar.pruning.units import training_loss
from attar.walks.reference import MEMORY, ReferenceModel, reference_of

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint

ROWS = 16  # calibration sequences that cuts are measured on
SHORTLIST = 6  # distinct plans of the smallest predicted KL that are measured as a whole


@dataclass(frozen=True)
class CutStudy:
    """A model, what may be cut from it, and the text it is measured on.

    Attributes:
        model: dense, float32, on its device.
        batches: int64 (B, S), of at most :data:`ROWS` rows.
        precision: of the passes.
        file: of the scan.
    """

    source: Checkpoint
    model: Any
    space: PlanSpace
    ranking: UnitRanking
    batches: list[Tensor]
    precision: str
    file: ScanFile

    def masked(self, sizes: PlanSizes, layers: Sequence[int], alone: int | None = None) -> Any:
        """A context in which the model computes what the cut one does."""
        return masked_units(self.model, self.space.cut_plan(sizes, self.ranking, layers, alone))

    def reference(self, work: Path) -> AbstractContextManager[ReferenceModel]:
        """The uncut model, for the length of the context."""
        blocks = [block.name for block in self.space.anatomy.blocks]
        return reference_of(self.model, blocks, self.batches, self.precision, MEMORY, work)


@dataclass(frozen=True)
class CutScan:
    """A finished scan.

    Attributes:
        rows: every cut of it.
        planned: costs of plans, with the order in which layers go.
    """

    rows: list[CutMeasurement]
    planned: PlannedModel

    def shares(self) -> dict[tuple[str, int], float]:
        """The share of the parameters that each even cut removes, by structure and kept units."""
        full = self.planned.full
        whole = self.planned.parameters(full)
        return {
            (row.structure, row.kept): 1
            - self.planned.parameters(full._replace(**{row.structure: row.kept})) / whole
            for row in self.rows
            if row.layer is None
        }


@dataclass(frozen=True)
class PlanTrial:
    """A plan that was measured as a whole.

    Attributes:
        predicted: the sum of its structures' scanned KLs.
        kl: of the uncut model to the cut one; loss: of the latter, None for encoders.
        bytes: of the cut model's weights, in the type they are stored in.
        speed: tokens a second over those of the uncut model, predicted from the bytes of weights that a step
            of decoding reads at batch 1.
    """

    sizes: PlanSizes
    predicted: float
    kl: float
    loss: float | None
    parameters: int
    bytes: int
    speed: float


def prune_mixed(task: PruneTask) -> None:
    """Cut the plan of the least KL within the budget.

    Raises:
        AttarError: the budget is out of reach, or removes nothing.
    """
    source, options, output, progress = task.source, task.options, task.output, task.progress
    space = plan_space(source.config)
    planned = planned_model(space, range(space.full.layers), stored_precision(source))
    plan_budget(planned, options).check(planned, space.grid)
    path = Path(options.scan) if options.scan else output.work / "scan.json"
    batches = task.batches()
    study = cut_study(source, space, task.settings, batches, path, output.work, progress)
    if note := precision_note(source):
        progress.log(note)
    scanned = scan_cuts(study, output.work / "reference", progress)
    trials = try_plans(study, scanned, options, output.work / "reference", progress)
    best = min(trials, key=lambda trial: trial.kl)
    if options.candidates > 1:
        from attar.pruning.candidates import compare_candidates

        best, output.details["candidates"] = compare_candidates(task, study, scanned, trials)
    full, layers = space.full, scanned.planned.kept_layers(best.sizes.layers)
    progress.log(f"prune mixed: {best.sizes.text(full)}: {_trial_text(scanned, best)}")
    plan = study.space.cut_plan(best.sizes, study.ranking, layers)
    kind = task.settings.reconstruction
    if plan.hidden is not None and kind != "none":
        progress.log("the plan removes channels of the residual stream: nothing is reconstructed")
    elif kind != "none":
        reconstruct_units(task, study.model, study.space.anatomy, plan, kind, batches)
        output.details["reconstruct"] = kind
    pruned = cut_model(study.model, plan)
    save_model(pruned, output.folder, dtype=stored_precision(source))
    shares = scanned.shares()
    output.details |= {
        "precision": study.precision,
        "plan": {
            **_trial_json(best, full),
            "layers_kept": layers,
            "removed_ratio": 1 - best.parameters / scanned.planned.parameters(full),
            "refused": dict(space.refused),
        },
        "plans": [_trial_json(trial, full) for trial in trials],
        "scan": [to_json(row) | {"share": shares.get((row.structure, row.kept))} for row in scanned.rows],
    }


def scan(
    model: str | Path | Checkpoint, path: Path, settings: PruneSettings, *, progress: Progress = SILENT
) -> tuple[dict[str, Any], str]:
    """Scan a model: every structure cut by several amounts, all layers alike and each layer alone. Returns
    the measurements for JSON, and as tables in text.

    Args:
        path: file of the measurements; what it holds is not measured again.

    Raises:
        AttarError: bad input; ``path`` belongs to another model, text or setting.
    """
    source = open_checkpoint(model)
    settings = fit(settings, source, progress)
    space = plan_space(source.config)
    for structure, reason in space.refused.items():
        progress.log(f"note: {structure} cannot be cut: {reason}")
    work = hidden(path, "work")
    study = cut_study(source, space, settings, calibration(source, settings), path, work, progress)
    scanned = scan_cuts(study, work / "reference", progress)
    shutil.rmtree(work, ignore_errors=True)
    rows = [to_json(row) for row in scanned.rows]
    return {"path": str(path), "measurements": rows}, scan_table(scanned.rows, scanned.shares())


def cut_study(
    source: Checkpoint,
    space: PlanSpace,
    settings: PruneSettings,
    batches: Sequence[Tensor],
    path: Path,
    work: Path,
    progress: Progress,
) -> CutStudy:
    """Load the model, and rank its units on all batches.

    Args:
        path: file of the scan.
        work: folder of the units' scores, which survive a kill.

    Raises:
        ModelError: the model has no head, or the file belongs to another scan.
    """
    model = load_model(source, dtype=torch.float32, device=pick_device(settings.device))
    anatomy, options = discover(model), cast(MixedSettings, settings.options)
    loss = training_loss(anatomy, load_tokenizer(source))
    precision = resolve(settings.precision, model.device)
    rows = torch.cat(list(batches))
    key = ScanKey(
        model=source.fingerprint(),
        data=sha256_text(f"{fingerprint(settings.data)} {settings.bos}"),
        tokens=rows[:ROWS].numel(),
        sequence_length=rows.shape[1],
        seed=settings.seed,
        samples=len(rows),
        criterion=options.criterion,
        precision=precision,
    )
    file = ScanFile(path, key)
    ranking = rank_units(
        model,
        anatomy,
        space.structures,
        batches,
        loss,
        work / sha256_text(canonical_json(asdict(key)))[:16],
        criterion=options.criterion,
        precision=precision,
        progress=progress,
    )
    measured = list(rows[:ROWS].split(settings.batch_size))
    return CutStudy(source, model, space, ranking, measured, precision, file)


def scan_cuts(study: CutStudy, work: Path, progress: Progress) -> CutScan:
    """Measure all cuts that the file does not hold yet."""
    space, file = study.space, study.file
    alone = list(layer_cuts(space.full, space.structures, space.full.layers))
    even = list(even_cuts(space.measured, space.full))
    missing = [cut for cut in (*alone, *even) if cut.identity not in file.known]
    if missing:
        total = len(alone) + len(even)
        with (
            progress.task("scan", total=total, done=total - len(missing)) as task,
            study.reference(work) as reference,
        ):
            measure = partial(measure_cuts, reference, file=file, causal=space.anatomy.causal, task=task)
            measure(alone, masking=partial(_mask_layer, study))
            reference.restart()
            removal = removal_order(list(file.known.values()), space.full.layers)
            measure(even, masking=partial(_mask_evenly, study, removal))
    removal = removal_order(list(file.known.values()), space.full.layers)
    rows = [file.known[cut.identity] for cut in (*even, *alone)]
    return CutScan(rows, planned_model(space, removal, stored_precision(study.source)))


def _mask_layer(study: CutStudy, cut: CutMeasurement) -> Any:
    """One layer cut alone."""
    full = study.space.full
    if cut.structure == "layers":
        return study.masked(full, [layer for layer in range(full.layers) if layer != cut.layer])
    return study.masked(full._replace(**{cut.structure: cut.kept}), range(full.layers), cut.layer)


def _mask_evenly(study: CutStudy, removal: Sequence[int], cut: CutMeasurement) -> Any:
    """All layers cut alike, or some of them left out."""
    sizes = study.space.full._replace(**{cut.structure: cut.kept})
    return study.masked(sizes, sorted(removal[len(removal) - sizes.layers :]))


def try_plans(
    study: CutStudy, scanned: CutScan, options: MixedSettings, work: Path, progress: Progress
) -> list[PlanTrial]:
    """The shortlisted plans within the budget, measured as a whole; the best first."""
    space, planned = study.space, scanned.planned
    known = curves(scanned.rows, space.full)
    grid = _scanned_grid(space.grid, known)
    budget = plan_budget(planned, options)

    def candidates(part: PlanGrid) -> Iterator[PlanSizes]:
        return plans_within(predicted_kl(known, part), planned.over(part, budget.cost), budget.limit, part)

    def accepts(plan: PlanSizes) -> bool:
        return plan != space.full and budget.fits(plan) and space.allows(plan)

    budget.check(planned, grid)
    plans = shortlist(candidates, accepts, grid, space.full, SHORTLIST)
    trials = []
    with progress.task("plans", total=len(plans)) as task, study.reference(work) as reference:
        for plan in plans:
            with study.masked(plan, planned.kept_layers(plan.layers)):
                kl, loss = distance(reference, space.anatomy.causal)
            one = PlanGrid(*((size,) for size in plan))
            trials.append(
                PlanTrial(
                    sizes=plan,
                    predicted=float(predicted_kl(known, one)),
                    kl=kl,
                    loss=loss,
                    parameters=planned.parameters(plan),
                    bytes=planned.file_bytes(plan),
                    speed=planned.read_bytes(space.full) / planned.read_bytes(plan),
                )
            )
            task.advance(kl=kl)
    return sorted(trials, key=lambda trial: (trial.kl, trial.parameters))


def _scanned_grid(grid: PlanGrid, known: Any) -> PlanGrid:
    """The amounts between those that were measured and did not break the model."""
    return PlanGrid(
        *(
            tuple(
                units
                for units in values
                if units >= (known[name].points[0][0] if name in known else values[-1])
            )
            for name, values in zip(STRUCTURES, grid, strict=True)
        )
    )


def _trial_json(trial: PlanTrial, full: PlanSizes) -> dict[str, Any]:
    """A trial for the card."""
    return {
        "plan": trial.sizes.text(full),
        **trial.sizes._asdict(),
        "predicted_kl": trial.predicted,
        "kl": trial.kl if math.isfinite(trial.kl) else None,
        "loss": trial.loss,
        "parameters": trial.parameters,
        "bytes": trial.bytes,
        "predicted_speed": trial.speed,
    }


def _trial_text(scanned: CutScan, trial: PlanTrial) -> str:
    """What a plan costs and loses, on one line."""
    share = 1 - trial.parameters / scanned.planned.parameters(scanned.planned.full)
    return (
        f"removes {share:.1%} of the parameters, {bytes_text(trial.bytes)}, decodes about {trial.speed:.2f}x "
        f"as fast (predicted from the bytes read); KL {trial.kl:.4f}, the sum of its parts "
        f"{trial.predicted:.4f}"
    )
