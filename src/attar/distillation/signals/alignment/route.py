"""Which teachers need an alignment of tokens, and what cannot be had with one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attar.checkpoint.open import Checkpoint
from attar.data.packing import row_length
from attar.distillation.settings import DistillSettings, LearnSettings
from attar.distillation.signals.alignment.retokenize import Retokenizer
from attar.distillation.signals.alignment.tokenizers import (
    missing_specials,
    same_tokenizer,
    vocabulary_size,
)
from attar.errors import ModelError, SettingsError
from attar.models.loading.load import load_tokenizer

LEAST_SHARED = 0.1  # of the smaller vocabulary


@dataclass(frozen=True)
class TokenizerPair:
    """What the tokenizers of student and teacher have in common.

    Attributes:
        retokenizer: to the teacher's tokens; None: both have one tokenizer.
        vocabulary: columns of both models' logits that are tokens; the rest is padding, and never learned.
            None: the columns are no tokens, or of two tokenizers.
        missing: special tokens of the student, by number, that the teacher lacks.
    """

    retokenizer: Retokenizer | None = None
    vocabulary: int | None = None
    missing: Mapping[int, str] = field(default_factory=dict)


def tokenizer_pair(
    student: Checkpoint, teacher: Checkpoint, settings: LearnSettings, task: str
) -> TokenizerPair:
    """Of two checkpoints, which may be one.

    Args:
        task: of the student, a name of attar.distillation.tasks.TASKS.

    Raises:
        SettingsError: the tokenizers differ, and a setting needs the same tokens on both sides; or rows are
            longer than the teacher's context.
        ModelError: the tokenizers are of kinds that cannot be compared, or share too little.
    """
    if not settings.runs_teacher:
        return TokenizerPair()
    ours, theirs = load_tokenizer(student), load_tokenizer(teacher)
    if not same_tokenizer(ours, theirs):
        _check(settings, teacher, task)
        return TokenizerPair(_retokenizer(ours, theirs, student, teacher))
    _check_length(settings, student, teacher)
    size = min(vocabulary_size(ours), vocabulary_size(theirs))
    return TokenizerPair(None, None if task == "classification" else size, missing_specials(ours, theirs))


def _check_length(settings: LearnSettings, student: Checkpoint, teacher: Checkpoint) -> None:
    """Refuse rows that the student can read and the teacher cannot."""
    ours, theirs = (row_length(settings.sequence_length, model.config) for model in (student, teacher))
    if ours > theirs:
        allowed = f"at most {theirs}, the context of {teacher.name}"
        raise SettingsError("sequence_length", settings.sequence_length, allowed)


def _retokenizer(ours: Any, theirs: Any, student: Checkpoint, teacher: Checkpoint) -> Retokenizer:
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
        raise SettingsError("teacher_top", settings.predictions.teacher_top, f"0: {why}")
    if task != "causal":
        raise SettingsError("task", task, f"causal: {why}")
    if isinstance(settings, DistillSettings) and (settings.for_drafting or settings.teacher_share > 0):
        name = "for_drafting" if settings.for_drafting else "teacher_generated"
        raise SettingsError(
            name, getattr(settings, name, settings.teacher_share), f"left out: rows are the teacher's, {why}"
        )
