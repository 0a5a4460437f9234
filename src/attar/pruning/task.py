"""What a method of pruning is given: the checkpoint, the settings, the output, the calibration text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attar.checkpoint.open import Checkpoint
from attar.checkpoint.output import StageOutput
from attar.data.packing import row_length
from attar.data.seen import note_texts, record
from attar.models.loading.calibration import calibration_text
from attar.models.loading.load import load_tokenizer
from attar.progress import Progress
from attar.pruning.settings import PruneSettings


@dataclass(frozen=True)
class PruneTask:
    """One pruning.

    Attributes:
        source: dense.
        output: its ``folder`` gets the pruned weights, its ``work`` survives a kill, its ``details`` go into
            the card.
    """

    source: Checkpoint
    settings: PruneSettings
    output: StageOutput
    progress: Progress

    @property
    def options(self) -> Any:
        """The options of the method."""
        return self.settings.options

    def batches(self) -> list[Tensor]:
        """The calibration batches, int64 (B, S); the card records which text they are."""
        settings, tokenizer = self.settings, load_tokenizer(self.source)
        length = row_length(settings.sequence_length, self.source.config)
        text = record("prune", tokenizer, settings, "calibration", length=length, rows=settings.samples)
        note_texts(self.output, [text], self.progress)
        return calibration(self.source, settings)


def calibration(source: Checkpoint, settings: PruneSettings) -> list[Tensor]:
    """The calibration batches of the settings, int64 (B, S)."""
    return calibration_text(source, settings)
