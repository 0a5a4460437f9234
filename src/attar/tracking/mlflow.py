"""MLflow (https://mlflow.org), by its client: the server of MLFLOW_TRACKING_URI, the experiment of
MLFLOW_EXPERIMENT_NAME (attar). A run that goes on is found by its tag ``attar.run``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from attar.tracking.events import TrackEvent

PARAMETERS, LENGTH, METRICS = 100, 6000, 1000  # of one call, by MLflow's bounds
STATES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class MLflowTracker:
    """One run after another; no run is MLflow's active one, so that others may have theirs."""

    def __init__(self) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "attar"
        experiment = self._client.get_experiment_by_name(name)
        self._experiment = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._run = ""

    def __call__(self, event: TrackEvent) -> None:
        """Log an event."""
        if event.kind == "start":
            self._start(event)
        self._log(event.numbers, event.step)
        if event.kind == "end":
            self._client.set_terminated(self._run, status=STATES[event.state])

    def _start(self, event: TrackEvent) -> None:
        known = self._client.search_runs(
            [self._experiment], filter_string=f"tags.`attar.run` = '{event.run}'"
        )
        if known:
            self._run = known[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        tags = {"attar.run": event.run, "attar.verb": event.verb, "attar.group": event.group}
        run = self._client.create_run(self._experiment, tags=tags, run_name=event.name)
        self._run = run.info.run_id
        from mlflow.entities import Param

        parameters = [Param(name, str(value)[:LENGTH]) for name, value in event.settings.items()]
        for first in range(0, len(parameters), PARAMETERS):
            self._client.log_batch(self._run, params=parameters[first : first + PARAMETERS])

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics: list[Any] = [Metric(name, value, now, step) for name, value in numbers.items()]
        for first in range(0, len(metrics), METRICS):
            self._client.log_batch(self._run, metrics=metrics[first : first + METRICS])
