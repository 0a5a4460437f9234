"""The causal task: each token predicted from those before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attar.data.examples import Examples
from attar.data.packing import pack, row_length
from attar.data.seen import record
from attar.distillation.settings import LearnSettings
from attar.distillation.tasks.task import HELD_OUT_TOKENS, Task
from attar.errors import ModelError
from attar.models.anatomy import discover
from attar.models.device import pick_device
from attar.models.load import load_model, load_tokenizer
from attar.progress import SILENT, Progress

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint


def load_causal(
    checkpoint: Checkpoint, settings: LearnSettings, *, teacher: bool = False, progress: Progress = SILENT
) -> Any:
    """The model in float32 on its device; refused unless it is a causal language model."""
    model = load_model(checkpoint, dtype=torch.float32, device=pick_device(settings.device))
    if not discover(model).causal:
        raise ModelError(
            f"{checkpoint.path}: {checkpoint.config['architectures'][0]} is not a causal language model",
            hint="--task masked for a masked language model; --data FILE.tsv with labels for a classifier",
        )
    return model


def training_text(checkpoint: Checkpoint, settings: LearnSettings, count: int) -> Tensor:
    """At most ``count`` rows int64 (N, S) of text of the train split."""
    return _text(checkpoint, settings, "train", count, settings.seed)


def _text(checkpoint: Checkpoint, settings: LearnSettings, split: str, count: int, seed: int) -> Tensor:
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


def _training(checkpoint: Checkpoint, settings: LearnSettings, count: int) -> Examples:
    return Examples.of_text(training_text(checkpoint, settings, count))


def _held_out(checkpoint: Checkpoint, settings: LearnSettings) -> Examples:
    count = max(HELD_OUT_TOKENS // row_length(settings.sequence_length, checkpoint.config), 1)
    return Examples.of_text(_text(checkpoint, settings, "calibration", count, 0))


def _records(stage: str, checkpoint: Checkpoint, settings: LearnSettings, count: int) -> list[dict[str, Any]]:
    tokenizer, length = load_tokenizer(checkpoint), row_length(settings.sequence_length, checkpoint.config)
    held_out = max(HELD_OUT_TOKENS // length, 1)
    common: dict[str, Any] = {"length": length, "packing": settings.packing}
    return [
        record(stage, tokenizer, settings, "train", rows=count, **common),
        record(stage, tokenizer, settings, "calibration", rows=held_out, seed=0, **common),
    ]


causal = Task("causal", load_causal, _training, _held_out, _records)
