"""Calibration sets: a few hundred rows that show a compression algorithm what the model sees."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attar.data.packing import pack


def calibration_batches(
    tokenizer: Any,
    data: str,
    *,
    samples: int,
    sequence_length: int,
    batch_size: int,
    seed: int,
    bos: str = "auto",
) -> list[Tensor]:
    """The first ``samples`` rows of the calibration split in the seed's order, as int64 (B, S) batches.

    Raises:
        DataError: the source holds less than one row.
    """
    rows = pack(tokenizer, data, "calibration", length=sequence_length, rows=samples, seed=seed, bos=bos)
    return list(rows.split(batch_size))
