"""What a student learns from its teacher: the train walk with the teacher run beside the student.

    alpha T^2 KL(teacher || student) + (1 - alpha) cross-entropy, mean over the predicted tokens

``alpha`` is the weight of the soft loss. With ``teacher_top`` the teacher is run once for each row
(teacher.py). A student that will draft gets another soft loss in KL's place, and rows that the teacher wrote
(draft.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attar.data.packing import PADDING, pack, row_length
from attar.distillation.draft import HELD_OUT_TOKENS, LOSSES, RolloutWriter
from attar.distillation.forward_kl import forward_kl, sparse_forward_kl
from attar.distillation.layer_map import layer_map
from attar.distillation.settings import DistillSettings, RecoverSettings
from attar.distillation.teacher import CachedTeacher
from attar.models.anatomy import discover
from attar.models.device import resolve
from attar.models.load import load_tokenizer
from attar.models.student import fresh_student, student_by_depth
from attar.progress import Progress
from attar.walks.objectives import next_token_loss
from attar.walks.train import Loss, TrainHistory, train

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint


@dataclass(frozen=True)
class Signal:
    """Where a student's signal comes from.

    Attributes:
        checkpoint: the teacher's.
        folder: for what is kept of its predictions, with ``teacher_top``.
    """

    checkpoint: Checkpoint
    folder: Path

    def kept(self, student: Any, teacher: Any, settings: RecoverSettings, precision: str) -> CachedTeacher:
        """The teacher with its memory."""
        width = min(model.get_output_embeddings().weight.shape[0] for model in (student, teacher))
        return CachedTeacher(
            teacher,
            self.folder,
            self.checkpoint.fingerprint(),
            precision,
            settings.teacher_top,
            settings.temperature,
            width,
        )


Soft = Callable[[Tensor, Tensor, float], Tensor]
"""``soft(student's logits, teacher's logits, temperature)``: a scalar, the mean over tokens."""


def beginner(teacher: Any, settings: DistillSettings) -> tuple[list[int], Any]:
    """The teacher's layers that a student begins with, or that its own are like where it is narrower; and the
    student before its first step.

    Raises:
        SettingsError: more layers than the teacher has, or a width that it cannot have.
    """
    depth = len(discover(teacher).blocks)
    kept = layer_map(settings.layer_map, depth, settings.layers, settings.keep_layers)
    if settings.width:
        return kept, fresh_student(teacher, kept, settings.width, settings.seed)
    return kept, student_by_depth(teacher, kept)


def learn(
    student: Any,
    teacher: Any,
    source: Checkpoint,
    settings: RecoverSettings,
    *,
    work: Path,
    progress: Progress,
    what: str,
    signal: Signal,
    writer: RolloutWriter | None = None,
) -> TrainHistory:
    """Train the student, in place.

    Args:
        student: every parameter is trained, in float32.
        teacher: gives ``.logits``; none of its parameters gets a gradient afterwards.
        source: a checkpoint with the tokenizer and the context of both.
        work: folder of resumable states.
        what: the name shown beside the bar.
        signal: the teacher's checkpoint, and where its predictions are kept if they are.
        writer: makes the student a draft model: its rows, and the loss of its settings.
    """
    wanted = training_rows(settings)
    rows, kept = _text(source, settings, wanted)
    soft: Soft = forward_kl
    if writer is not None:
        soft = LOSSES[writer.settings.draft_loss]
        rows, kept = writer.training_rows(wanted, rows), writer.held_out_rows()
    teacher.requires_grad_(False)
    student.requires_grad_(True)
    folder = work / "train"
    loss = soft_loss(teacher, settings.temperature, settings.alpha, soft)
    if settings.teacher_top:
        precision = resolve(settings.precision, teacher.device, folder)
        loss = kept_loss(signal.kept(student, teacher, settings, precision), settings.alpha)

    def held_out(model: nn.Module) -> float:
        """The training loss on rows never trained on."""
        device = next(model.parameters()).device
        parts = [
            float(loss(model, batch.to(device))) * len(batch) for batch in kept.split(settings.batch_size)
        ]
        return sum(parts) / len(kept)

    return train(student, loss, rows, settings, work=folder, held_out=held_out, progress=progress, what=what)


def training_rows(settings: RecoverSettings) -> int:
    """Rows of text to learn from: as many as the steps take, or as the settings say."""
    wanted = settings.steps * settings.batch_size * settings.accumulate
    return min(settings.rows or wanted, wanted)


def _text(source: Checkpoint, settings: RecoverSettings, wanted: int) -> tuple[Tensor, Tensor]:
    """Rows of text: at most ``wanted`` to train on, and some that are held out."""
    tokenizer, length = load_tokenizer(source), row_length(settings.sequence_length, source.config)

    def rows(split: str, count: int, seed: int) -> Tensor:
        packing, data, bos = settings.packing, settings.data, settings.bos
        return pack(tokenizer, data, split, length=length, rows=count, seed=seed, packing=packing, bos=bos)

    return rows("train", wanted, settings.seed), rows("calibration", max(HELD_OUT_TOKENS // length, 1), 0)


def soft_loss(teacher: nn.Module, temperature: float, alpha: float, soft: Soft = forward_kl) -> Loss:
    """The loss of distillation: alpha T^2 KL(teacher || student) + (1 - alpha) CE, mean over the predicted
    tokens; ``soft`` may stand in KL's place.

    Padded places are left out. Vocabularies padded to different widths are compared over the common part.
    """

    def loss(student: nn.Module, tokens: Tensor) -> Tensor:
        shown = tokens.clamp(min=0)
        logits = student(input_ids=shown).logits
        predicted = tokens[:, 1:] != PADDING
        total = logits.new_zeros((), dtype=torch.float32)
        if alpha > 0.0:
            with torch.no_grad():
                guide = teacher(input_ids=shown).logits
            width = min(guide.shape[-1], logits.shape[-1])
            ours, theirs = (_at(z[:, :-1, :width], predicted) for z in (logits, guide))
            total = total + alpha * soft(ours, theirs, temperature)
        if alpha < 1.0:
            total = total + (1.0 - alpha) * next_token_loss(logits, tokens)
        return total

    return loss


def kept_loss(teacher: CachedTeacher, alpha: float) -> Loss:
    """:func:`soft_loss` with forward KL, where the teacher's predictions are kept."""

    def loss(student: nn.Module, tokens: Tensor) -> Tensor:
        logits = student(input_ids=tokens.clamp(min=0)).logits
        total = logits.new_zeros((), dtype=torch.float32)
        if alpha > 0.0:
            target, predicted = teacher(tokens), (tokens[:, 1:] != PADDING).flatten()
            z = logits[:, :-1, : teacher.width].flatten(0, 1)
            parts = (z, target.tokens, target.weights, target.entropy)
            if not bool(predicted.all()):
                parts = tuple(part[predicted] for part in parts)
            total = total + alpha * sparse_forward_kl(*parts, teacher.temperature)
        if alpha < 1.0:
            total = total + (1.0 - alpha) * next_token_loss(logits, tokens)
        return total

    return loss


def _at(logits: Tensor, predicted: Tensor) -> Tensor:
    """Logits (n, V) where a token is predicted; all of them, as they are, where nothing is padded."""
    return logits if bool(predicted.all()) else logits[predicted]
