"""Trackio (https://huggingface.co/docs/trackio): project TRACKIO_PROJECT (attar), on this machine, or where
TRACKIO_SPACE_ID says. A run that goes on is resumed by its name, which has the run's id.
"""

from __future__ import annotations

import os
from typing import Any

from attar.tracking.events import TrackEvent


class TrackioTracker:
    """One run after another."""

    def __init__(self) -> None:
        import trackio

        self._init = trackio.init
        self._run: Any = None

    def __call__(self, event: TrackEvent) -> None:
        """Log an event."""
        if event.kind == "start":
            self._run = self._init(
                project=os.environ.get("TRACKIO_PROJECT") or "attar",
                name=f"{event.name} {event.run}",
                group=event.group or None,
                config={"verb": event.verb, **event.settings},
                resume="allow",
                embed=False,
            )
        if event.numbers:
            self._run.log(dict(event.numbers), step=event.step)
        if event.kind == "end":
            self._run.finish()
