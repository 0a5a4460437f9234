"""The text that the teacher's units are scored on: a few rows of the calibration split."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from attar.checkpoint.open import Checkpoint
from attar.data.packing import row_length
from attar.data.seen import record
from attar.models.loading.calibration import calibration_text
from attar.models.loading.load import load_tokenizer
from attar.progress import SILENT, Progress
from attar.walks.settings import TrainSettings

ROWS = 32


@dataclass(frozen=True)
class ScoringText:
    """Calibration text of a teacher.

    Attributes:
        work: folder for scores, which survive a kill.
        precision: of the passes: ``bf16`` or ``fp32``.
    """

    source: Checkpoint
    settings: TrainSettings
    work: Path
    precision: str = "fp32"
    progress: Progress = SILENT

    @property
    def length(self) -> int:
        """Tokens in a row."""
        return row_length(self.settings.sequence_length, self.source.config)

    def batches(self) -> list[Tensor]:
        """Int64 (B, S), none padded."""
        return calibration_text(self.source, self.settings, ROWS)

    def record(self) -> dict[str, Any]:
        """Of this text, for :func:`attar.data.seen.note_texts`."""
        tokenizer = load_tokenizer(self.source)
        return record("distill", tokenizer, self.settings, "calibration", length=self.length, rows=ROWS)
