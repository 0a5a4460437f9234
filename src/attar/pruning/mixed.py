"""The method ``mixed``: heads, neurons, channels and layers together, as much of each as costs least
quality.

1. The units of every structure are ranked by the criterion; the layers, by the KL of leaving each out.
2. Each structure is cut alone by several amounts, uniformly, and the KL measured (scan.py).
3. Every plan is costed exactly; the sum of the scanned KLs ranks the plans within the budget (plans.py).
4. The best few, and the best of each single structure, are measured as a whole; the least KL wins, or, with
   ``candidates``, the best after a short distillation (candidates.py).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from attar.checkpoint.atomic import hidden
from attar.checkpoint.open import Checkpoint
from attar.data.auto import fit
from attar.errors import UsageError
from attar.importance.scoring import UnitScoring, no_loss
from attar.models.loading.fit import admit
from attar.models.loading.kept_mtp import NARROWER, keep_mtp
from attar.models.loading.load import save_model
from attar.models.loading.stored import precision_note, stored_precision
from attar.models.surgery.plan_space import plan_space
from attar.progress import SILENT, Progress
from attar.pruning.planning.budget import plan_budget
from attar.pruning.planning.candidates import candidate_texts, compare_candidates
from attar.pruning.planning.scan import scan_table, to_json
from attar.pruning.planning.study import cut_study, scan_cuts
from attar.pruning.planning.trials import try_plans
from attar.pruning.reconstruction.units import reconstruct_units
from attar.pruning.settings import PruneSettings
from attar.pruning.task import PruneTask, calibration
from attar.pruning.units import checked_cut


def prune_mixed(task: PruneTask) -> None:
    """Cut the plan of the least KL within the budget.

    Raises:
        AttarError: the budget is out of reach, or removes nothing; or there are several processes.
    """
    source, options, output, progress = task.source, task.options, task.output, task.progress
    if output.processes.count > 1:
        raise UsageError("--method mixed works in one process", hint="leave out --launch")
    space = plan_space(source.config, stored_precision(source))
    plan_budget(space.planned, options).check(space.planned, space.grid)
    texts = candidate_texts(task, space.anatomy) if options.candidates > 1 else None
    path = Path(options.scan) if options.scan else output.work / "scan.json"
    batches = task.batches()
    study = cut_study(source, space, task.settings, batches, path, output.work, progress)
    if note := precision_note(source):
        progress.log(note)
    scanned = scan_cuts(study, output.work / "reference", progress, complete=False)
    trials = try_plans(study, scanned, options, output.work / "reference", progress)
    best = min(trials, key=lambda trial: trial.kl)
    if texts is not None:
        best, output.details["candidates"] = compare_candidates(task, texts, study, scanned, trials)
    full, layers = space.full, scanned.planned.kept_layers(best.sizes.layers)
    progress.log(f"prune mixed: {best.text(full)}")
    plan = space.cut_plan(best.sizes, study.ranking, layers)
    kind = task.settings.reconstruction
    if plan.hidden is not None and kind != "none":
        progress.log("the plan removes channels of the residual stream: nothing is reconstructed")
    elif kind != "none":
        reconstruct_units(task, study.model, space.anatomy, plan, kind, batches)
        output.details["reconstruct"] = kind
    scoring = UnitScoring(study.model, space.anatomy, (), study.batches, no_loss, output.work)
    save_model(checked_cut(scoring, plan), output.folder, dtype=stored_precision(source))
    keep_mtp(source, output.folder, progress, NARROWER if plan.is_narrower else "")
    shares = scanned.shares()
    output.details |= {
        "precision": study.precision,
        "plan": {**best.to_json(full), "layers_kept": layers, "refused": dict(space.refused)},
        "plans": [trial.to_json(full) for trial in trials],
        "scan": [
            to_json(row) | {"share": shares[row.structure, row.kept] if row.layer is None else None}
            for row in scanned.rows
        ],
    }


def scan(
    model: str | Path | Checkpoint, path: Path, settings: PruneSettings, *, progress: Progress = SILENT
) -> tuple[dict[str, Any], str]:
    """Scan a model: every structure cut by several amounts, uniformly and in each layer alone. Returns
    the measurements for JSON, and as tables in text.

    Args:
        path: file of the measurements; measurements in the file are not repeated.

    Raises:
        AttarError: bad input; ``path`` belongs to another model, text or setting.
    """
    source = admit(model, progress, text=True, dense=True)
    settings = fit(settings, source, progress)
    space = plan_space(source.config, stored_precision(source))
    for structure, reason in space.refused.items():
        progress.log(f"note: {structure} cannot be cut: {reason}")
    work = hidden(path, "work")
    study = cut_study(source, space, settings, calibration(source, settings), path, work, progress)
    scanned = scan_cuts(study, work / "reference", progress)
    shutil.rmtree(work, ignore_errors=True)
    rows = [to_json(row) for row in scanned.rows]
    return {"path": str(path), "measurements": rows}, scan_table(scanned.rows, scanned.shares())
