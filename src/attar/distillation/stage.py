"""The verbs ``distill`` (a shallower student) and ``recover`` (a damaged model learns from the one it was
made from).

What they learn, and how, is in learn.py; for a student that will draft, in draft.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attar.checkpoint.companions import copy_companions
from attar.checkpoint.open import open_checkpoint
from attar.checkpoint.output import produce
from attar.data.auto import fit
from attar.data.packing import row_length
from attar.data.seen import note_texts, record
from attar.data.sources import fingerprint
from attar.distillation.draft import HELD_OUT_TOKENS, Writer, report
from attar.distillation.learn import Signal, beginner, learn, training_rows
from attar.distillation.settings import VERSION, DistillSettings, RecoverSettings
from attar.errors import ModelError
from attar.models.anatomy import discover
from attar.models.device import pick_device
from attar.models.load import load_model, load_tokenizer, save_model
from attar.models.precision import precision_note, stored_precision
from attar.progress import SILENT, Progress
from attar.walks.train import History

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint


def distill(
    teacher: str | Path | Checkpoint,
    out: Path,
    settings: DistillSettings,
    *,
    progress: Progress = SILENT,
    force: bool = False,
    key: str | None = None,
    signal: Path | None = None,
) -> Checkpoint:
    """Make a student with fewer of the teacher's layers and train it on the teacher's distribution.

    Args:
        teacher: a dense or packed causal language model.
        out: the folder to make; for drafting its card's details tell acceptance and tokens a pass.
        signal: folder for what ``teacher_top`` keeps, which other stages may share; None: it goes with the
            stage's scratch.

    Raises:
        AttarError: see errors.py; nothing is left behind.
    """
    source = open_checkpoint(teacher)
    load_tokenizer(source)  # what cannot be read is said before the weights are
    settings = fit(settings, source, progress)
    model = _causal(source, settings)
    kept, student = beginner(model, settings)
    text = fingerprint(settings.data)
    with produce(
        out, "distill", settings, VERSION, [source], signals=[source], text=text, force=force, key=key
    ) as output:
        note_texts(output, _records("distill", source, settings), progress)
        writer = _writer(model, source, settings, output.work, progress) if settings.for_drafting else None
        history = learn(
            student,
            model,
            source,
            settings,
            work=output.work,
            progress=progress,
            what="distill",
            signal=Signal(source, signal or output.work / "signal"),
            writer=writer,
        )
        _save(student, source, output, history, progress)
        if settings.width:
            output.details["width"] = settings.width
        else:
            output.details["layer_map"] = kept
        if writer is not None:
            made = load_model(output.folder, dtype=torch.float32, device=pick_device(settings.device))
            rows = writer.held_out_rows()
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
    signal: Path | None = None,
) -> Checkpoint:
    """Train a pruned model to agree with the model it was cut from.

    Args:
        model: the damaged model; its shape is kept.
        out: the folder to make.
        teacher: the model to agree with; both have one tokenizer.
        signal: as in :func:`distill`.

    Raises:
        AttarError: see errors.py; nothing is left behind.
    """
    source, other = open_checkpoint(model), open_checkpoint(teacher)
    settings = fit(settings, source, progress)
    _same_tokens(source, other)
    student, guide = _causal(source, settings), _causal(other, settings)
    text = fingerprint(settings.data)
    with produce(
        out, "recover", settings, VERSION, [source], signals=[other], text=text, force=force, key=key
    ) as output:
        note_texts(output, _records("recover", source, settings), progress)
        history = learn(
            student,
            guide,
            source,
            settings,
            work=output.work,
            progress=progress,
            what="recover",
            signal=Signal(other, signal or output.work / "signal"),
        )
        _save(student, source, output, history, progress)
    return open_checkpoint(out)


def _writer(
    model: Any, source: Checkpoint, settings: DistillSettings, work: Path, progress: Progress
) -> Writer:
    """The teacher, ready to write rows as long as those of the text."""
    length = row_length(settings.sequence_length, source.config)
    return Writer(model, load_tokenizer(source), settings, length, work / "samples", progress)


def _records(stage: str, source: Checkpoint, settings: RecoverSettings) -> list[dict[str, Any]]:
    """The text that is trained on, and that the best state is chosen by."""
    tokenizer, length = load_tokenizer(source), row_length(settings.sequence_length, source.config)
    wanted, packing = training_rows(settings), settings.packing
    return [
        record(stage, tokenizer, settings, "train", length=length, rows=wanted, packing=packing),
        record(
            stage,
            tokenizer,
            settings,
            "calibration",
            length=length,
            rows=max(HELD_OUT_TOKENS // length, 1),
            seed=0,
            packing=packing,
        ),
    ]


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


def _save(student: Any, source: Checkpoint, output: Any, history: History, progress: Progress) -> None:
    if note := precision_note(source):
        progress.log(note)
    save_model(student, output.folder, dtype=stored_precision(source))
    copy_companions(source.path, output.folder)
    output.details.update(
        curve=history.curve,
        tokens=history.tokens,
        steps=history.step,
        stopped_early=history.stopped,
        precision=history.precision,
    )
