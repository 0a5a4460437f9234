"""The verbs ``distill`` (a smaller student) and ``recover`` (a damaged model learns from the original)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attar.checkpoint.companions import copy_companions
from attar.checkpoint.open import Checkpoint, open_checkpoint
from attar.checkpoint.output import produce
from attar.checkpoint.processes import Processes
from attar.data.auto import fit
from attar.data.packing import row_length
from attar.data.seen import note_texts
from attar.data.sources import fingerprint
from attar.distillation.adapters import add_adapters, save_adapter
from attar.distillation.authors import check_authors
from attar.distillation.for_drafting import draft_report
from attar.distillation.learn import learn, training_rows
from attar.distillation.masked_adapters import add_masked_adapters, merge_masked_adapters
from attar.distillation.rollouts.teacher import RolloutWriter
from attar.distillation.settings import VERSION, DistillSettings, RecoverSettings
from attar.distillation.signals.alignment.route import tokenizer_pair
from attar.distillation.signals.target import SignalSource
from attar.distillation.student_settings import StudentSettings
from attar.distillation.students.dense import dense_student
from attar.distillation.students.make import given_student, make_student
from attar.distillation.students.plan import StudentPlan, plan_student
from attar.distillation.students.text import ScoringText
from attar.distillation.tasks import task_of
from attar.models.anatomy.discover import discover
from attar.models.loading.device import pick_device, resolve
from attar.models.loading.fit import admit
from attar.models.loading.kept_mtp import NARROWER, keep_mtp
from attar.models.loading.load import load_model, load_tokenizer, save_model
from attar.models.loading.stored import precision_note, stored_precision
from attar.models.surgery.zeros import resolve_zeros, stated_zeros, zero_mask
from attar.progress import SILENT, Progress
from attar.walks.masks import Masks
from attar.walks.train import TrainHistory

ADAPTER = "adapter"  # folder of the adapters inside the output


def distill(
    teacher: str | Path | Checkpoint,
    out: Path,
    settings: DistillSettings,
    *,
    progress: Progress = SILENT,
    force: bool = False,
    key: str | None = None,
    signal: Path | None = None,
    samples: Path | None = None,
) -> Checkpoint:
    """Make a student of the teacher, or take a given one, and train it on the teacher's distribution.

    With ``adapter_rank`` the student's weights stay as they start, and low-rank adapters learn, which ``out``
    has added to its weights; of a given student ``out/adapter`` has them alone, too.

    Args:
        teacher: a dense or packed language model.
        out: the folder to make; for drafting its card has acceptance and tokens a pass.
        signal: folder of the predictions that ``teacher_top`` keeps, for several stages; None: in the stage's
            work folder.
        samples: folder of the rows that the teacher writes, for several stages; None: in the work folder.

    Raises:
        AttarError: see errors.py; no output is left.
    """
    source = admit(teacher, progress, text=True, dense=True)
    given = admit(settings.student.student, progress, dense=True) if settings.student.student else None
    base = source if given is None else given
    settings = fit(settings, source, progress)
    writes = settings.for_drafting or settings.teacher_share > 0.0
    signals = [source] if writes or settings.runs_teacher else []
    authors = check_authors(base, signals, settings, progress, signal=settings.objective == "sft")
    task = task_of(base.config, settings)
    causal = task.name == "causal"
    base, source = (admit(model, progress, causal=causal, dense=True) for model in (base, source))
    tokens = tokenizer_pair(base, source, settings, task.name)
    plan, student = None, None  # type: StudentPlan | None, Any
    way = settings.student.moe_to_dense
    if given is None and not way:
        plan = plan_student(source.config, stored_precision(source), settings.student)
    model = task.load(source, settings, teacher=settings.runs_teacher, progress=progress)
    if given is not None:
        student = given_student(
            task.load(given, settings, progress=progress), settings.student, settings.seed
        )
        task.check_pair(student, model)
    text = fingerprint(settings.data)
    parents: dict[str, Any] = {"signals": signals, "data": authors}
    with produce(
        out, "distill", settings, VERSION, [base], **parents, text=text, force=force, key=key
    ) as output:
        records = task.records("distill", base, settings, training_rows(settings))
        precision = resolve(settings.precision, model.device, output.work)
        scored = ScoringText(source, settings, output.work / "scores", precision, progress)
        if way or (plan is not None and plan.is_scored):
            records.append(scored.record())
        note_texts(output, records, progress)
        record: dict[str, Any] = {"given": base.name}
        if plan is not None:
            student, record = _cut_student(model, plan, scored, settings)
        elif way:
            student, record = dense_student(model, way, scored.batches()), {"dense": way}
        count = sum(parameter.numel() for parameter in student.parameters())
        output.details["student"] = record | {"init": settings.student.init, "parameters": count}
        if plan is not None and not settings.student.width:
            output.details["layer_map"] = record["layers"]
        if settings.adapter_rank:
            torch.manual_seed(settings.seed)  # A is drawn
            student = add_adapters(student, linears_of(student), settings.adapter_rank)
        written = samples or output.shared / "samples"
        rollouts = _rollouts(model, source, settings, written, output.processes, progress) if writes else None
        cache = signal or output.work / "signal"
        origin = SignalSource(model, source, cache, output.work / "train", tokens)
        history = learn(
            student,
            origin,
            base,
            task,
            settings,
            progress=progress,
            what="distill",
            rollouts=rollouts,
            details=output.details,
        )
        output.exit_unless_rank0()
        if settings.adapter_rank:
            if given is not None:
                save_adapter(student, output.folder / ADAPTER, given.spelling)
            student = student.merge_and_unload()
        _save(student, base, output, history, progress, _mtp_misfit(plan, way, settings.student))
        if settings.for_drafting and rollouts is not None:
            draft = load_model(output.folder, dtype=torch.float32, device=pick_device(settings.device))
            rows = rollouts.held_out_rows().tokens
            output.details["drafting"] = draft_report(
                draft, model, rows, rollouts.prompt, settings.batch_size
            )
    return open_checkpoint(out)


def _cut_student(
    model: Any, plan: StudentPlan, text: ScoringText, settings: DistillSettings
) -> tuple[Any, dict[str, Any]]:
    """The student made of a teacher, before its first step, and what the card says of it."""
    for line in plan.lines():
        text.progress.log(line)
    units, student = make_student(model, settings.student, settings.seed, plan=plan, text=text)
    record = {**plan.record(), "layers": list(units.layers or ())}
    return student, record | ({"width": settings.student.width} if settings.student.width else {})


def recover(
    model: str | Path | Checkpoint,
    out: Path,
    settings: RecoverSettings,
    *,
    teacher: str | Path | Checkpoint | None = None,
    progress: Progress = SILENT,
    force: bool = False,
    key: str | None = None,
    signal: Path | None = None,
) -> Checkpoint:
    """Train a pruned or quantized model to agree with the original.

    With ``adapter_rank`` its weights stay as they are and low-rank adapters learn: ``out`` is the dense
    model with the adapters added, and ``out/adapter`` the adapters alone, in peft's format, for use over
    ``model``. Where zeros are kept there is no ``out/adapter``: masked_adapters.py says why.

    Args:
        model: the damaged model; its shape is kept, and its zeros as ``keep_zeros`` has it.
        teacher: the model to agree with, whose tokenizer may be another one. With ``alpha`` 0 it may be None.
        signal: as in :func:`distill`.

    Raises:
        AttarError: see errors.py; no output is left.
    """
    if teacher is None:
        settings.check_alone()
    source = admit(model, progress, text=True, dense=True)
    original = None
    if teacher is not None and settings.reads_teacher:
        original = admit(teacher, progress, dense=True)
    settings = replace(settings, keep_zeros=resolve_zeros(source, settings.keep_zeros))
    settings = fit(settings, source, progress)
    signals = [] if original is None else [original]
    authors = check_authors(source, signals, settings, progress, signal=settings.objective == "sft")
    task = task_of(source.config, settings)
    source = admit(source, progress, causal=task.name == "causal", dense=True)
    tokens = tokenizer_pair(source, original or source, settings, task.name)
    student = task.load(source, settings, progress=progress)
    guide = None if original is None else task.load(original, settings, teacher=True)
    if guide is not None:
        task.check_pair(student, guide)
    names = linears_of(student)
    masks = Masks.of(student, names, partial(zero_mask, keep=settings.keep_zeros))
    student = _trainable(student, names, guide, masks, settings)
    text = fingerprint(settings.data)
    parents: dict[str, Any] = {"signals": signals, "data": authors}
    with produce(
        out, "recover", settings, VERSION, [source], **parents, text=text, force=force, key=key
    ) as output:
        for note in _zero_notes(masks, len(names), settings):
            progress.log(note)
        note_texts(output, task.records("recover", source, settings, training_rows(settings)), progress)
        cache = signal or output.work / "signal"
        origin = SignalSource(guide, original, cache, output.work / "train", tokens)
        dense_masks = None if settings.adapter_rank else masks
        history = learn(
            student,
            origin,
            source,
            task,
            settings,
            progress=progress,
            what="recover",
            masks=dense_masks,
            details=output.details,
        )
        output.exit_unless_rank0()
        if settings.adapter_rank and masks:
            student = merge_masked_adapters(student, names)
        elif settings.adapter_rank:
            save_adapter(student, output.folder / ADAPTER, source.spelling)
            student = student.merge_and_unload()
        masks.check(student)
        _save(student, source, output, history, progress)
        if masks:
            output.details["kept_zeros"] = {"linears": len(masks.kept), "sparsity": masks.sparsity}
            output.details.update(stated_zeros(source))
    return open_checkpoint(out)


def linears_of(model: Any) -> list[str]:
    """Paths of the Linears of the blocks."""
    return [name for block in discover(model).blocks for name in block.linears]


def _zero_notes(masks: Masks, linears: int, settings: RecoverSettings) -> Iterator[str]:
    """Lines about zeros that are kept."""
    if not masks:
        return
    count = "all" if len(masks.kept) == linears else f"{len(masks.kept)} of the"
    yield (
        f"recover: the zeros of {count} {linears} Linears stay, {masks.sparsity:.1%} of their weights "
        "(--keep-zeros false trains them too)"
    )
    if settings.adapter_rank:
        yield f"no {ADAPTER} folder: adapters alone would fill the zeros; the model's weights have them"


def _trainable(
    student: Any, names: list[str], teacher: Any | None, masks: Masks, settings: RecoverSettings
) -> Any:
    """The student with what will be trained marked by ``requires_grad``: every weight, or adapters."""
    if not settings.adapter_rank:
        return student.requires_grad_(True)
    start = teacher if settings.adapter_init == "error" else None
    torch.manual_seed(settings.seed)  # A is drawn
    if masks:
        return add_masked_adapters(student, names, settings.adapter_rank, masks, start)
    return add_adapters(student, names, settings.adapter_rank, start)


def _rollouts(
    model: Any,
    source: Checkpoint,
    settings: DistillSettings,
    folder: Path,
    processes: Processes,
    progress: Progress,
) -> RolloutWriter:
    """The teacher as a source of rows as long as those of the text."""
    length = row_length(settings.sequence_length, source.config)
    return RolloutWriter(model, load_tokenizer(source), settings, length, folder, progress, processes)


def _mtp_misfit(plan: StudentPlan | None, way: str, settings: StudentSettings) -> str:
    """Why a student cannot have its teacher's multi-token prediction head; empty where it can."""
    if way or settings.width or (plan is not None and plan.is_narrower):
        return NARROWER
    return "the student starts afresh" if settings.init == "random" else ""


def _save(
    student: Any,
    source: Checkpoint,
    output: Any,
    history: TrainHistory,
    progress: Progress,
    why_no_mtp: str = "",
) -> None:
    if note := precision_note(source):
        progress.log(note)
    save_model(student, output.folder, dtype=stored_precision(source))
    keep_mtp(source, output.folder, progress, why_no_mtp)
    copy_companions(source.path, output.folder)
    output.details.update(
        curve=history.curve,
        tokens=history.tokens,
        steps=history.step,
        stopped_early=history.stopped,
        precision=history.precision,
    )
