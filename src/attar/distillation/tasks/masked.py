"""The masked task: hidden tokens predicted from both sides.

A student learns from its teacher at the hidden tokens; DistilBERT (Sanh et al. 2019, arXiv 1910.01108) is
this with ``alpha`` between 0 and 1 and the cosine of hidden states as a feature.
"""

from __future__ import annotations

from typing import Any

import torch

from attar.checkpoint.open import Checkpoint
from attar.data.examples import Examples
from attar.data.masking import MaskedBatches, MaskRule, hide, masked_rows
from attar.data.packing import Batches, numbered_generator, row_length
from attar.data.seen import record
from attar.distillation.settings import RowSettings
from attar.distillation.tasks.task import HELD_OUT_TOKENS, Task
from attar.errors import ModelError
from attar.models.anatomy.discover import discover
from attar.models.loading.device import pick_device
from attar.models.loading.load import load_model, load_tokenizer
from attar.progress import SILENT, Progress


def load_masked(
    checkpoint: Checkpoint, settings: RowSettings, *, teacher: bool = False, progress: Progress = SILENT
) -> Any:
    """The model in float32 on its device; refused unless it is a masked language model."""
    MaskRule.of(load_tokenizer(checkpoint))
    model = load_model(checkpoint, dtype=torch.float32, device=pick_device(settings.device))
    if model.get_output_embeddings() is None or discover(model).causal:
        raise ModelError(
            f"{checkpoint.path}: {checkpoint.config['architectures'][0]} is not a masked language model",
            hint="the task of a classifier is classification, that of a GPT causal",
        )
    return model


def _rows(checkpoint: Checkpoint, settings: RowSettings, split: str, count: int, seed: int) -> torch.Tensor:
    length = row_length(settings.sequence_length, checkpoint.config)
    options: dict[str, Any] = {"length": length, "rows": count, "seed": seed, "packing": settings.packing}
    return masked_rows(load_tokenizer(checkpoint), settings.data, split, **options).rows


def _training(checkpoint: Checkpoint, settings: RowSettings, count: int) -> MaskedBatches:
    rows = _rows(checkpoint, settings, "train", count, settings.seed)
    rule = MaskRule.of(load_tokenizer(checkpoint))
    return MaskedBatches(Batches(rows, settings.batch_size, settings.seed), rule)


def _held_out_count(checkpoint: Checkpoint, settings: RowSettings) -> int:
    return max(HELD_OUT_TOKENS // row_length(settings.sequence_length, checkpoint.config), 1)


def _held_out(checkpoint: Checkpoint, settings: RowSettings) -> Examples:
    rows = _rows(checkpoint, settings, "calibration", _held_out_count(checkpoint, settings), 0)
    return hide(rows, MaskRule.of(load_tokenizer(checkpoint)), numbered_generator(0, 0))


def _records(stage: str, checkpoint: Checkpoint, settings: RowSettings, count: int) -> list[dict[str, Any]]:
    tokenizer, length = load_tokenizer(checkpoint), row_length(settings.sequence_length, checkpoint.config)
    held_out = _held_out_count(checkpoint, settings)
    common: dict[str, Any] = {"length": length, "packing": settings.packing}
    return [
        record(stage, tokenizer, settings, "train", rows=count, **common),
        record(stage, tokenizer, settings, "calibration", rows=held_out, seed=0, **common),
    ]


masked = Task("masked", load_masked, _training, _held_out, _records)
