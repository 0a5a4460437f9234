"""How well every parent and the merge predict held-out text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from attar.checkpoint.open import open_checkpoint
from attar.data.packing import evaluation_rows, row_length
from attar.data.seen import held_out_note
from attar.errors import DataError, ModelError
from attar.merging.adapters.apply import tokenizer_folder
from attar.merging.held_out import HeldOutText
from attar.merging.planning.model import ModelView
from attar.merging.planning.prepare import PreparedMerge
from attar.merging.settings import MergeSettings
from attar.models.loading.load import load_tokenizer
from attar.progress import Progress

WORSE = 1.5
"""A merge with more nats a byte than this times its worst parent's is most likely broken."""


def measure_quality(
    prepared: PreparedMerge,
    folder: Path,
    settings: MergeSettings,
    texts: Sequence[HeldOutText],
    progress: Progress,
    records: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """``quality`` for the card: loss and perplexity of every parent and of the merge.

    The text is the split ``evaluation``, which no search reads. Each model reads it with its own tokenizer:
    models with different tokenizers are comparable by ``nats_per_byte``, not by loss and perplexity. One
    model is in memory at a time. Where a model has no loss on text, or the merged tokenizer gives too few
    tokens, the result is empty and a line is logged.

    Args:
        folder: of the merge.
        texts: of :func:`texts_of_parents`.
        records: of the text that the parents and the search have read (attar.data.seen).
    """
    plan = prepared.merge.plan
    views: list[ModelView] = [*plan.models, open_checkpoint(folder)]
    rows: list[dict[str, Any]] = []
    with progress.task("measure", total=len(views)) as task:
        for index, (name, view) in enumerate(zip((*plan.labels, "merge"), views, strict=True)):
            try:
                text = texts[index] if index < len(texts) else _text(view, settings, prepared)
                rows.append({"name": name, **_quality(view, text)})
            except (ModelError, DataError) as error:  # such as an encoder without a mask token
                progress.log(f"quality is not measured: {error.message}")
                return {}
            task.advance(loss=rows[-1]["loss"])
    note = _held_out_note(views[-1], settings, prepared, records)
    details: dict[str, Any] = {"quality": rows, "held_out": not note}
    if note:
        details["held_out_note"] = note
        progress.log(f"warning: quality is not of held-out text: {note}")
    worst, merged = max(row["nats_per_byte"] for row in rows[:-1]), rows[-1]["nats_per_byte"]
    if merged > WORSE * worst:
        details["warning"] = (
            "the merge predicts held-out text far worse than its worst parent: "
            f"{merged:.3f} against {worst:.3f} nats a byte"
        )
        progress.log(f"warning: {details['warning']}")
    return details


def texts_of_parents(prepared: PreparedMerge, settings: MergeSettings) -> list[HeldOutText]:
    """The held-out text of every parent, read before the merge starts.

    Raises:
        CheckpointError: a parent has no tokenizer.
        DataError: the text is missing or too short.
    """
    return [_text(view, settings, prepared) for view in prepared.merge.plan.models]


def _text(view: ModelView, settings: MergeSettings, prepared: PreparedMerge) -> HeldOutText:
    tokens = prepared.quality_tokens(settings)
    return HeldOutText.of(tokenizer_folder(view), view.config, settings, split="evaluation", tokens=tokens)


def _held_out_note(
    view: ModelView, settings: MergeSettings, prepared: PreparedMerge, records: Sequence[dict[str, Any]]
) -> str:
    """What a parent or the search has read of the text; empty: nothing."""
    tokens = prepared.quality_tokens(settings)
    tokenizer, length = load_tokenizer(tokenizer_folder(view)), min(settings.sequence_length, tokens)
    text = evaluation_rows(
        tokenizer,
        settings.data,
        tokens=tokens,
        sequence_length=row_length(length, dict(view.config)),
        seed=settings.seed,
        bos=settings.bos,
    )
    return held_out_note(tokenizer, [text.rows], text.shared, records)


def _quality(view: ModelView, text: HeldOutText) -> dict[str, float]:
    loss = text.loss_of(view.config, _LazyState(view))
    predicted = text.rows[:, 1:]
    rows = load_tokenizer(tokenizer_folder(view)).batch_decode(predicted)
    nbytes = sum(len(row.encode()) for row in rows)
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "nats_per_byte": loss * predicted.numel() / max(nbytes, 1),
    }


@dataclass(frozen=True)
class _LazyState(Mapping[str, Tensor]):
    """A model's tensors, each read when it is used."""

    view: ModelView

    def __getitem__(self, name: str) -> Tensor:
        return self.view.load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.view.tensors)

    def __len__(self) -> int:
        return len(self.view.tensors)
