"""The held-out text of an evaluation in a subject's tokens."""

from __future__ import annotations

from torch import Tensor

from attar.data.auto import AUTO
from attar.data.packing import PackedRows, evaluation_rows
from attar.data.python_text import PROSE
from attar.measure.settings import EvaluateSettings
from attar.measure.subject import Subject


def held_out(subject: Subject, settings: EvaluateSettings) -> list[Tensor]:
    """The settings' held-out text in the subject's tokens, int64 (B, S) batches. Raises as
    :func:`held_out_rows`."""
    return list(held_out_rows(subject, settings).rows.split(settings.batch_size))


def held_out_rows(subject: Subject, settings: EvaluateSettings) -> PackedRows:
    """The settings' held-out text in the subject's tokens, with what is known against its being held out.

    Sequences are at most as long as the subject's context.

    Raises:
        DataError: the text is missing or too short.
    """
    length = min(settings.sequence_length, subject.context or settings.sequence_length)
    return evaluation_rows(
        subject.tokenizer,
        PROSE
        if settings.data == AUTO
        else settings.data,  # a model in memory has no name or template to go by
        tokens=settings.tokens,
        sequence_length=length,
        seed=settings.seed,
        bos=settings.bos,
    )
