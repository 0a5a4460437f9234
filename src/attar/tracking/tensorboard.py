"""TensorBoard (https://www.tensorflow.org/tensorboard): a folder a run below TENSORBOARD_LOGGING_DIR
(./tensorboard). A run that goes on adds a file to its folder.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from attar.checkpoint.hashing import canonical_json
from attar.tracking.events import TrackEvent


class TensorBoardTracker:
    """One run after another; steps are on the disk as they come, since a kill loses what is not."""

    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make = SummaryWriter
        self._writer: Any = None

    def __call__(self, event: TrackEvent) -> None:
        """Log an event."""
        if event.kind == "start":
            root = Path(os.environ.get("TENSORBOARD_LOGGING_DIR") or "tensorboard")
            self._writer = self._make(str(root / event.group / f"{event.name}-{event.run}"))
            self._writer.add_text("settings", f"    {canonical_json(dict(event.settings))}")
        for name, value in event.numbers.items():
            self._writer.add_scalar(name, value, event.step)
        self._writer.flush()
        if event.kind == "end":
            self._writer.close()
