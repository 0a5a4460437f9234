"""An evaluation as a task on a worker: settings and results as JSON."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attar.checkpoint.card import plain
from attar.cluster.settings import ClusterSettings
from attar.cluster.tasks import DONE, ClusterTask, run_tasks
from attar.cluster.workers import workers_of
from attar.errors import EndpointError
from attar.measure.settings import EvaluateSettings
from attar.progress import SILENT, Progress


def evaluate_on(
    model: str,
    settings: EvaluateSettings,
    cluster: ClusterSettings,
    *,
    reference: str | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """The record of :func:`attar.measure.evaluate.evaluate`, made on a worker.

    Raises:
        EndpointError: the evaluation failed there.
    """
    arguments = {
        "model": model,
        "reference": reference,
        "settings": asdict(settings),
        "folder": str(Path.cwd()),
    }
    task = ClusterTask("evaluate", f"{__name__}:evaluate_task", arguments, resources=cluster.resources)
    workers = workers_of(cluster)
    try:
        outcome = run_tasks([task], workers, None, progress=progress)["evaluate"]
    finally:
        workers.close()
    if outcome.state != DONE:
        raise EndpointError(f"evaluate on {cluster.on}: {outcome.message}", hint=outcome.hint or None)
    record: dict[str, Any] = outcome.result
    return record


def evaluate_task(
    *, model: str, reference: str | None, settings: dict[str, Any], folder: str
) -> dict[str, Any]:
    """Runs on a worker."""
    from attar.measure.evaluate import evaluate

    if Path(folder).is_dir():
        os.chdir(folder)
    values: dict[str, Any] = {
        name: tuple(item) if isinstance(item, list) else item for name, item in settings.items()
    }
    record: dict[str, Any] = plain(evaluate(model, EvaluateSettings(**values), reference=reference).to_dict())
    return record
