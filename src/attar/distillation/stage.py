"""The verbs ``distill`` (a shallower student) and ``recover`` (a damaged model learns from the one it was
made from).

Both are the train walk with one loss: alpha T^2 KL(teacher || student) + (1 - alpha) cross-entropy, the
teacher run beside the student. ``alpha`` is the weight of the soft loss. A student that will draft gets
another soft loss and rows of the teacher's own (draft.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attar.checkpoint.companions import copy_companions
from attar.checkpoint.open import open_checkpoint
from attar.checkpoint.output import produce
from attar.data.packing import PADDING, pack, row_length
from attar.distillation.draft import LOSSES, Writer, report
from attar.distillation.forward_kl import forward_kl
from attar.distillation.layer_map import layer_map
from attar.distillation.settings import VERSION, DistillSettings, RecoverSettings
from attar.errors import ModelError
from attar.models.anatomy import discover
from attar.models.device import pick_device
from attar.models.load import load_model, load_tokenizer, save_model
from attar.models.precision import stored_precision
from attar.models.student import fresh_student, student_by_depth
from attar.progress import SILENT, Progress
from attar.walks.objectives import next_token_loss
from attar.walks.train import History, Loss, train

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint

HELD_OUT_TOKENS = 16_384

Soft = Callable[[Tensor, Tensor, float], Tensor]
"""``soft(student's logits, teacher's logits, temperature)``: a scalar, the mean over tokens."""


def distill(
    teacher: str | Path | Checkpoint,
    out: Path,
    settings: DistillSettings,
    *,
    progress: Progress = SILENT,
    force: bool = False,
    key: str | None = None,
) -> Checkpoint:
    """Make a student with fewer of the teacher's layers and train it on the teacher's distribution.

    Args:
        teacher: a dense or packed causal language model.
        out: the folder to make; for drafting its card's details tell acceptance and tokens a pass.

    Raises:
        AttarError: see errors.py; nothing is left behind.
    """
    source = open_checkpoint(teacher)
    model = _causal(source, settings)
    depth = len(discover(model).blocks)
    kept = layer_map(settings.layer_map, depth, settings.layers or max(depth // 2, 1))
    student = _student(model, kept, settings)
    with produce(
        out,
        stage="distill",
        version=VERSION,
        settings=asdict(settings),
        seed=settings.seed,
        parents=[(source, "weights"), (source, "signal")],
        force=force,
        key=key,
    ) as output:
        writer = _writer(model, source, settings, output.work, progress) if settings.for_drafting else None
        history = _learn(student, model, source, settings, output.work, progress, "distill", writer)
        _save(student, source, output, history)
        if settings.width:
            output.details["width"] = settings.width
        else:
            output.details["layer_map"] = kept
        if writer is not None:
            made = load_model(output.folder, dtype=torch.float32, device=pick_device(settings.device))
            rows = writer.held_out_rows(HELD_OUT_TOKENS)
            output.details["drafting"] = report(made, model, rows, writer.prompt, settings.batch_size)
    return open_checkpoint(out)


def recover(
    model: str | Path | Checkpoint,
    out: Path,
    settings: RecoverSettings,
    *,
    teacher: str | Path | Checkpoint,
    progress: Progress = SILENT,
    force: bool = False,
    key: str | None = None,
) -> Checkpoint:
    """Train a pruned model to agree with the model it was cut from.

    Args:
        model: the damaged model; its shape is kept.
        out: the folder to make.
        teacher: the model to agree with; both have one tokenizer.

    Raises:
        AttarError: see errors.py; nothing is left behind.
    """
    source, signal = open_checkpoint(model), open_checkpoint(teacher)
    student, guide = _causal(source, settings), _causal(signal, settings)
    _same_tokens(source, signal)
    with produce(
        out,
        stage="recover",
        version=VERSION,
        settings=asdict(settings),
        seed=settings.seed,
        parents=[(source, "weights"), (signal, "signal")],
        force=force,
        key=key,
    ) as output:
        history = _learn(student, guide, source, settings, output.work, progress, "recover")
        _save(student, source, output, history)
    return open_checkpoint(out)


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


def _at(logits: Tensor, predicted: Tensor) -> Tensor:
    """Logits (n, V) where a token is predicted; all of them, as they are, where nothing is padded."""
    return logits if bool(predicted.all()) else logits[predicted]


def _learn(
    student: Any,
    teacher: Any,
    source: Checkpoint,
    settings: RecoverSettings,
    work: Path,
    progress: Progress,
    what: str,
    writer: Writer | None = None,
) -> History:
    """Run the train walk; the student's weights change. A ``writer`` makes it a draft model."""
    tokenizer = load_tokenizer(source)
    wanted = settings.steps * settings.batch_size * settings.accumulate
    length = row_length(settings.sequence_length, source.config)
    packing = settings.packing
    rows = pack(
        tokenizer, settings.data, "train", length=length, rows=wanted, seed=settings.seed, packing=packing
    )
    held = max(HELD_OUT_TOKENS // length, 1)
    kept = pack(tokenizer, settings.data, "calibration", length=length, rows=held, seed=0, packing=packing)
    teacher.requires_grad_(False)
    loss = soft_loss(teacher, settings.temperature, settings.alpha)
    if writer is not None:
        soft = LOSSES[writer.settings.draft_loss]
        loss = soft_loss(teacher, settings.temperature, settings.alpha, soft)
        rows, kept = writer.training_rows(wanted, rows), writer.held_out_rows(HELD_OUT_TOKENS)

    def held_out(model: nn.Module) -> float:
        """The training loss on rows never trained on."""
        device = next(model.parameters()).device
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16"):
            parts = [
                float(loss(model, batch.to(device))) * len(batch) for batch in kept.split(settings.batch_size)
            ]
        return sum(parts) / len(kept)

    folder = work / "train"
    return train(student, loss, rows, settings, work=folder, held_out=held_out, progress=progress, what=what)


def _student(model: Any, kept: list[int], settings: DistillSettings) -> Any:
    """The student before its first step."""
    if not settings.width:
        return student_by_depth(model, kept)
    return fresh_student(model, kept, settings.width, settings.seed)


def _writer(
    model: Any, source: Checkpoint, settings: DistillSettings, work: Path, progress: Progress
) -> Writer:
    """The teacher, ready to write rows as long as those of the text."""
    length = row_length(settings.sequence_length, source.config)
    return Writer(model, load_tokenizer(source), settings, length, work / "samples", progress)


def _causal(checkpoint: Checkpoint, settings: RecoverSettings) -> Any:
    """The model in float32 on its device, which must be a causal language model."""
    model = load_model(checkpoint, dtype=torch.float32, device=pick_device(settings.device))
    if not discover(model).causal:
        raise ModelError(
            f"{checkpoint.path}: {checkpoint.config['architectures'][0]} is not a causal language model",
            hint="encoders can be pruned and quantized, but not distilled yet",
        )
    return model


def _same_tokens(model: Checkpoint, teacher: Checkpoint) -> None:
    """Logits can be compared only where a token number means the same text."""
    ours, theirs = load_tokenizer(model).get_vocab(), load_tokenizer(teacher).get_vocab()
    if ours != theirs:
        differing = sum(theirs.get(token) != number for token, number in ours.items())
        raise ModelError(
            f"{teacher.path}: not the student's tokenizer ({differing} of {len(ours)} tokens differ)",
            hint="teacher and student need the same vocabulary",
        )


def _save(student: Any, source: Checkpoint, output: Any, history: History) -> None:
    save_model(student, output.folder, dtype=stored_precision(source))
    copy_companions(source.path, output.folder)
    output.details.update(
        curve=history.curve, tokens=history.tokens, steps=history.step, stopped_early=history.stopped
    )
