"""The calibration text of a verb, from its settings."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attar.checkpoint.open import Checkpoint
from attar.data.packing import calibration_batches, row_length
from attar.models.loading.load import load_tokenizer
from attar.options import flatten


def calibration_text(
    checkpoint: Checkpoint, settings: Any, samples: int | None = None, split: str = "calibration"
) -> list[Tensor]:
    """The calibration batches, int64 (B, S), none padded.

    Args:
        settings: with the options data, samples, sequence_length, batch_size, seed and bos.
        samples: sequences, where they are not those of the settings.

    Raises:
        DataError: there is not enough text.
    """
    options = flatten(settings)
    return calibration_batches(
        load_tokenizer(checkpoint),
        options["data"],
        samples=options["samples"] if samples is None else samples,
        sequence_length=row_length(options["sequence_length"], checkpoint.config),
        batch_size=options["batch_size"],
        seed=options["seed"],
        bos=options.get("bos", "auto"),
        split=split,
    )
