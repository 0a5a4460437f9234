"""What a task says to the rest: how a checkpoint is loaded for it, and what its examples are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attar.checkpoint.open import Checkpoint
from attar.data.examples import Examples
from attar.distillation.settings import RowSettings
from attar.walks.train import BatchSource

HELD_OUT_TOKENS = 16_384  # held-out tokens, about


@dataclass(frozen=True)
class Task:
    """One kind of prediction.

    Attributes:
        load: ``load(checkpoint, settings, teacher=False, progress=SILENT)``: the model in float32 on its
            device; refused where the task does not suit it, or a teacher has no head for it.
        training: ``training(checkpoint, settings, count)``: at most ``count`` rows of the train split, or a
            source of batches of them.
        held_out: ``held_out(checkpoint, settings)``: rows that choose the best state.
        records: ``records(stage, checkpoint, settings, count)``: of all this text, for
            :func:`attar.data.seen.note_texts`.
        check_pair: ``check_pair(student, teacher)``: refuses models whose predictions do not compare.
    """

    name: str
    load: Callable[..., Any]
    training: Callable[[Checkpoint, RowSettings, int], Examples | BatchSource]
    held_out: Callable[[Checkpoint, RowSettings], Examples]
    records: Callable[[str, Checkpoint, RowSettings, int], list[dict[str, Any]]]
    check_pair: Callable[[Any, Any], None] = lambda student, teacher: None
