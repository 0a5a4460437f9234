"""Which teachers need an alignment of tokens, and what cannot be had with one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attar.distillation.settings import DistillSettings, LearnSettings
from attar.distillation.signals.alignment.retokenize import Retokenizer
from attar.distillation.signals.alignment.tokenizers import same_tokenizer
from attar.errors import ModelError, SettingsError
from attar.models.load import load_tokenizer

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint

LEAST_SHARED = 0.1  # of the smaller vocabulary


def retokenizer_of(
    student: Checkpoint, teacher: Checkpoint, settings: LearnSettings, task: str
) -> Retokenizer | None:
    """From the student's tokens to its teacher's; None where both have one tokenizer, or the teacher's
    predictions are not used.

    Args:
        task: of the student, a name of attar.distillation.tasks.TASKS.

    Raises:
        SettingsError: a setting needs the same tokens on both sides.
        ModelError: the tokenizers are of kinds that cannot be compared, or share too little.
    """
    if not settings.runs_teacher:
        return None
    ours, theirs = load_tokenizer(student), load_tokenizer(teacher)
    if same_tokenizer(ours, theirs):
        return None
    _check(settings, teacher, task)
    retokenizer = Retokenizer(ours, theirs, (student.name, teacher.name))
    smaller = min(len(retokenizer.our_bytes), len(retokenizer.their_bytes))
    if len(retokenizer.pairs) < LEAST_SHARED * smaller:
        raise ModelError(
            f"{teacher.path}: its tokenizer shares {len(retokenizer.pairs):,} tokens with the student's, of "
            f"{smaller:,}",
            hint="take a teacher whose vocabulary is nearer to the student's",
        )
    return retokenizer


def _check(settings: LearnSettings, teacher: Checkpoint, task: str) -> None:
    """Refuse what needs the same tokens on both sides."""
    why = f"{teacher.name} has another tokenizer than the student"
    if settings.features.features:
        raise SettingsError(
            "features", ",".join(settings.features.features), f"left out: positions differ, {why}"
        )
    if settings.teacher_signal == "cached":
        raise SettingsError("signal", "cached", f"online: {why}")
    if task != "causal":
        raise SettingsError("task", task, f"causal: {why}")
    if isinstance(settings, DistillSettings) and (settings.for_drafting or settings.teacher_share > 0):
        name = "for_drafting" if settings.for_drafting else "share"
        raise SettingsError(
            name, getattr(settings, name, settings.teacher_share), f"left out: rows are the teacher's, {why}"
        )
