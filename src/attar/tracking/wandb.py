"""Weights & Biases (https://docs.wandb.ai): project WANDB_PROJECT (attar), offline with WANDB_MODE=offline.

A run that goes on is resumed by its id.
"""

from __future__ import annotations

import os
from typing import Any

from attar.tracking.events import TrackEvent

LOGIN_S = 10.0
"""Seconds that wandb may wait for somebody to log in."""


class WandbTracker:
    """One run after another; a metric counts the steps of its task, not wandb's own."""

    def __init__(self) -> None:
        import wandb

        self._wandb: Any = wandb
        self._run: Any = None

    def __call__(self, event: TrackEvent) -> None:
        """Log an event."""
        if event.kind == "start":
            self._run = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT") or "attar",
                id=event.run,
                name=event.name,
                group=event.group or None,
                job_type=event.verb,
                config=dict(event.settings),
                resume="allow",
                settings=self._wandb.Settings(login_timeout=LOGIN_S),
            )
            self._run.define_metric("*", step_metric="step")
        elif event.kind == "step":
            self._run.log({**event.numbers, "step": event.step})
        else:
            self._run.summary.update(dict(event.numbers))
            self._run.finish(exit_code=0 if event.state == "finished" else 1)
