"""Train a student on its teacher: the rows, the signal, the train walk.

    alpha * objective(teacher, student) + (1 - alpha) * cross-entropy, mean over the predicted tokens

The objective is one of ``objectives/``; the signal (``signals/``) says where the teacher's predictions come
from: with ``teacher_top`` from a cache on disk. A draft model also trains on rows that its teacher
generated (rollouts.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from attar.data.packing import pack, row_length
from attar.distillation.objectives import OBJECTIVES
from attar.distillation.rollouts import HELD_OUT_TOKENS, RolloutWriter
from attar.distillation.settings import LearnSettings
from attar.distillation.signals import SIGNALS
from attar.distillation.signals.online import SignalSource
from attar.models.load import load_tokenizer
from attar.progress import Progress
from attar.walks.masks import Masks
from attar.walks.objectives import Loss, distillation_loss, next_token
from attar.walks.train import TrainHistory, train

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint


def learn(
    student: Any,
    source: SignalSource,
    text: Checkpoint,
    settings: LearnSettings,
    *,
    progress: Progress,
    what: str,
    rollouts: RolloutWriter | None = None,
    masks: Masks | None = None,
) -> TrainHistory:
    """Train the student, in place.

    Args:
        student: its parameters with ``requires_grad`` are trained, in float32.
        source: of the signal; none of the teacher's parameters gets a gradient afterwards.
        text: a checkpoint with the tokenizer and the context of both models.
        rollouts: makes the student a draft model: its rows, and the objective ``draft_loss``.
        masks: weights that are zero and stay zero.
    """
    count = training_rows(settings)
    rows, held_out = _text(text, settings, count)
    objective = OBJECTIVES["kl"]
    if rollouts is not None:
        objective = OBJECTIVES[rollouts.settings.draft_loss]
        rows, held_out = rollouts.training_rows(count, rows), rollouts.held_out_rows()
    loss: Loss = next_token
    if source.teacher is not None:
        source.teacher.requires_grad_(False)
        signal = SIGNALS["cached" if settings.teacher_top else "online"]
        loss = distillation_loss(signal(source, student, settings, objective), settings.alpha)

    def held_out_loss(model: nn.Module) -> float:
        return mean_loss(loss, model, held_out, settings.batch_size)

    options: dict[str, Any] = {"held_out": held_out_loss, "progress": progress, "what": what}
    return train(student, loss, rows, settings, work=source.work, masks=masks, **options)


def mean_loss(loss: Loss, model: nn.Module, rows: Tensor, batch_size: int) -> float:
    """The loss over rows (N, S), mean over the rows."""
    device = next(model.parameters()).device
    parts = [float(loss(model, batch.to(device))) * len(batch) for batch in rows.split(batch_size)]
    return sum(parts) / len(rows)


def training_rows(settings: LearnSettings) -> int:
    """Different rows of text to train on: as many as the steps take, or fewer where the settings say so."""
    count = settings.steps * settings.batch_size * settings.accumulate
    return min(settings.rows or count, count)


def _text(checkpoint: Checkpoint, settings: LearnSettings, count: int) -> tuple[Tensor, Tensor]:
    """Rows of text: at most ``count`` for training, and the held-out ones."""
    tokenizer, length = load_tokenizer(checkpoint), row_length(settings.sequence_length, checkpoint.config)

    def rows(split: str, count: int, seed: int) -> Tensor:
        packing, data, bos = settings.packing, settings.data, settings.bos
        return pack(
            tokenizer, data, split, length=length, rows=count, seed=seed, packing=packing, bos=bos
        ).rows

    return rows("train", count, settings.seed), rows("calibration", max(HELD_OUT_TOKENS // length, 1), 0)
