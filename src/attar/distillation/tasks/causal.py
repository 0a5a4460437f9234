"""The causal task: each token predicted from those before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.open import Checkpoint
from attar.data.answers import AnswerRows, has_conversations, pack_answers
from attar.data.examples import Examples
from attar.data.packing import pack, row_length
from attar.data.seen import record
from attar.distillation.settings import RowSettings
from attar.distillation.tasks.task import HELD_OUT_TOKENS, Task
from attar.errors import ModelError
from attar.models.anatomy.discover import discover
from attar.models.loading.device import pick_device
from attar.models.loading.load import load_model, load_tokenizer
from attar.progress import SILENT, Progress


def load_causal(
    checkpoint: Checkpoint, settings: RowSettings, *, teacher: bool = False, progress: Progress = SILENT
) -> Any:
    """The model in float32 on its device; refused unless it is a causal language model."""
    model = load_model(checkpoint, dtype=torch.float32, device=pick_device(settings.device))
    if not discover(model).causal:
        raise ModelError(
            f"{checkpoint.path}: {checkpoint.config['architectures'][0]} is not a causal language model",
            hint="--task masked for a masked language model; --data FILE.tsv with labels for a classifier",
        )
    return model


def training_text(checkpoint: Checkpoint, settings: RowSettings, count: int) -> Tensor:
    """At most ``count`` rows int64 (N, S) of text of the train split."""
    return _text(checkpoint, settings, "train", count, settings.seed)


def _text(checkpoint: Checkpoint, settings: RowSettings, split: str, count: int, seed: int) -> Tensor:
    length = row_length(settings.sequence_length, checkpoint.config)
    return pack(
        load_tokenizer(checkpoint),
        settings.data,
        split,
        length=length,
        rows=count,
        seed=seed,
        packing=settings.packing,
        bos=settings.bos,
    ).rows


def _answers(
    checkpoint: Checkpoint, settings: RowSettings, split: str, count: int, seed: int
) -> AnswerRows | None:
    """Rows of conversations of which the answers alone are predicted; None where the settings or the data
    want all tokens."""
    if not settings.answers_only or not has_conversations(settings.data):
        return None
    return pack_answers(
        load_tokenizer(checkpoint),
        settings.data,
        split,
        length=row_length(settings.sequence_length, checkpoint.config),
        rows=count,
        seed=seed,
        packing=settings.packing,
        bos=settings.bos,
    )


def _training(checkpoint: Checkpoint, settings: RowSettings, count: int) -> Examples:
    answers = _answers(checkpoint, settings, "train", count, settings.seed)
    return answers.examples if answers else Examples.of_text(training_text(checkpoint, settings, count))


def _held_out(checkpoint: Checkpoint, settings: RowSettings) -> Examples:
    count = _held_out_rows(checkpoint, settings)
    answers = _answers(checkpoint, settings, "calibration", count, 0)
    if answers is not None:
        return answers.examples
    return Examples.of_text(_text(checkpoint, settings, "calibration", count, 0))


def _held_out_rows(checkpoint: Checkpoint, settings: RowSettings) -> int:
    return max(HELD_OUT_TOKENS // row_length(settings.sequence_length, checkpoint.config), 1)


def _records(stage: str, checkpoint: Checkpoint, settings: RowSettings, count: int) -> list[dict[str, Any]]:
    splits = {"train": (count, settings.seed), "calibration": (_held_out_rows(checkpoint, settings), 0)}
    return [_record(stage, checkpoint, settings, split, *numbers) for split, numbers in splits.items()]


def _record(
    stage: str, checkpoint: Checkpoint, settings: RowSettings, split: str, count: int, seed: int
) -> dict[str, Any]:
    """The record of a split's text; with conversations, how many did not fit."""
    answers = _answers(checkpoint, settings, split, count, seed)
    counts: dict[str, Any] = {}
    if answers is not None:
        counts = {"conversations": answers.documents, "cut": answers.cut, "dropped": answers.dropped}
        counts["predicted"] = answers.examples.count()
    return counts | record(
        stage,
        load_tokenizer(checkpoint),
        settings,
        split,
        length=row_length(settings.sequence_length, checkpoint.config),
        rows=count,
        seed=seed,
        packing="separate" if answers else settings.packing,
    )


causal = Task("causal", load_causal, _training, _held_out, _records)
