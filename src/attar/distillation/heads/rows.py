"""What a head is trained on: rows that its target writes after prompts, and with ``--teacher-generated``
below 1 text.

A head drafts in contexts that its target has written, so by default all rows are the target's. Prompts are
those of any source (``rollouts/prompts.py``).

Letters: S tokens a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attar.checkpoint.open import Checkpoint
from attar.checkpoint.output import StageOutput
from attar.data.examples import Examples
from attar.data.packing import row_length
from attar.data.seen import note_texts
from attar.distillation.head_settings import TrainHeadSettings
from attar.distillation.heads.states import NumberedRows
from attar.distillation.learn import training_rows
from attar.distillation.rollouts.prompts import PromptRows, read_prompts
from attar.distillation.rollouts.sampling import joined
from attar.distillation.rollouts.teacher import HELD_OUT_SEED, RolloutWriter, held_out_tokens, repeated
from attar.distillation.tasks import TASKS
from attar.errors import DataError
from attar.models.loading.load import load_tokenizer
from attar.progress import Progress


@dataclass(frozen=True)
class HeadText:
    """The text behind the rows of a head.

    Attributes:
        count: rows of the training, repeated ones included.
        prompts: of the training.
        held_out: of the rows that measure it.
        text: rows that are learned as they are; None: there are none.
        records: of what was read, see :func:`attar.data.seen.note_texts`.
    """

    settings: TrainHeadSettings
    count: int
    prompts: PromptRows | None
    held_out: PromptRows
    text: Examples | None
    records: list[dict[str, Any]]

    @property
    def written(self) -> int:
        """Rows of the training that the target writes, repeated ones included."""
        return round(self.settings.teacher_share * self.count)

    def training_rows(self, writer: RolloutWriter) -> Examples:
        """The rows of the training; with text as many as its steps take, otherwise each once."""
        settings, parts = self.settings, list[Examples]()
        if self.prompts is not None:
            wanted = min(settings.teacher_rows.num_rollouts, self.written)
            prompts = [self.prompts.prompts[n % len(self.prompts.prompts)] for n in range(wanted)]
            rows = writer.after(prompts, settings.rollout_temperature, settings.seed, "train")
            parts.append(rows if self.text is None else repeated(rows, self.written))
        if self.text is not None:
            parts.append(repeated(self.text, self.count - self.written))
        return joined(parts)

    def held_out_rows(self, writer: RolloutWriter) -> Examples:
        """Rows of the target after held-out prompts, at temperature 1."""
        return writer.after(self.held_out.prompts, 1.0, HELD_OUT_SEED, "held-out")


def read_head_text(source: Checkpoint, tokenizer: Any, settings: TrainHeadSettings, count: int) -> HeadText:
    """Read the prompts and the text.

    Raises:
        DataError: there are none, or none that fit into a row.
    """
    length, task = row_length(settings.sequence_length, source.config), TASKS["causal"]
    prompt = min(settings.prompt_tokens, length - 1)
    held_out_rows = max(held_out_tokens() // (length - prompt), 1)
    options: dict[str, Any] = {"length": length, "bos": settings.bos, "tokens": prompt}
    held_out = read_prompts(tokenizer, settings.data, "calibration", count=held_out_rows, seed=0, **options)
    records = [held_out.record("train-head", tokenizer, settings.data, "calibration")]
    written = round(settings.teacher_share * count)
    prompts: PromptRows | None = None
    text: Examples | None = None
    if written:
        wanted = min(settings.teacher_rows.num_rollouts, written)
        options |= {"count": wanted, "seed": settings.seed, "packing": settings.packing}
        prompts = read_prompts(tokenizer, settings.data, "train", **options)
        records.append(prompts.record("train-head", tokenizer, settings.data, "train"))
    if written < count:
        given = task.training(source, settings, count - written)
        assert isinstance(given, Examples), "the causal task has rows"
        text = given
        records += task.records("train-head", source, settings, count - written)[:1]
    return HeadText(settings, count, prompts, held_out, text, records)


@dataclass(frozen=True)
class HeadRows:
    """The rows of a head.

    Attributes:
        training: as the steps read them.
        different: of the training, each once, by number.
        held_out: that measure it.
    """

    training: NumberedRows
    different: Examples
    held_out: Examples


def write_rows(
    source: Checkpoint,
    target: Any,
    settings: TrainHeadSettings,
    output: StageOutput,
    samples: Path | None,
    progress: Progress,
) -> HeadRows:
    """Read the text and have the target write its rows; the card gets what was read.

    Args:
        samples: folder of the rows that the target writes; None: in the work folder.

    Raises:
        DataError: there are no prompts, or the target answers none of them.
    """
    tokenizer, length = load_tokenizer(source), row_length(settings.sequence_length, source.config)
    text = read_head_text(source, tokenizer, settings, training_rows(settings))
    note_texts(output, text.records, progress)
    folder = samples or output.shared / "samples"
    writer = RolloutWriter(target, tokenizer, settings, length, folder, progress, output.processes)
    training, different = NumberedRows.of(text.training_rows(writer))
    held_out = text.held_out_rows(writer)
    for name, part in (("training", training), ("held-out", held_out)):
        if not part.count():
            raise DataError(f"{settings.data}: the model answers none of the {name} prompts")
    return HeadRows(training, different, held_out)
