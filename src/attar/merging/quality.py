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
from attar.merging.held_out import HeldOut
from attar.merging.planning.prepare import Prepared, asked_tokens
from attar.merging.settings import MergeSettings
from attar.models.load import load_tokenizer
from attar.progress import Progress

WORSE = 1.5  # times the worst parent's loss in nats a byte: a merge behind that is most likely broken


def measure_quality(
    prepared: Prepared,
    folder: Path,
    settings: MergeSettings,
    texts: Sequence[HeldOut],
    progress: Progress,
    records: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """``quality`` for the card: loss and perplexity of every parent and of the merge.

    The text is that of the split ``evaluation``, which no search has seen. Each model reads it through its
    own tokenizer: between models with different ones, ``nats_per_byte`` compares, and loss and perplexity do
    not. One model is in memory at a time. Where a model has no loss on text, or the merged tokenizer makes
    too little of it, the merge stands and a line says so.

    Args:
        texts: of :func:`texts_of_parents`.
        records: of what the parents and the search have read (attar.data.seen).
    """
    plan = prepared.merge.plan
    models = {**dict(zip(plan.labels, plan.models, strict=True)), "merge": open_checkpoint(folder)}
    rows: list[dict[str, Any]] = []
    with progress.task("measure", total=len(models)) as task:
        for number, (name, view) in enumerate(models.items()):
            try:
                text = texts[number] if number < len(texts) else _text(view, settings, prepared)
                rows.append({"name": name, **_quality(view, text)})
            except (ModelError, DataError) as error:  # an encoder without a mask token, say
                progress.log(f"quality is not measured: {error.message}")
                return {}
            task.advance(loss=rows[-1]["loss"])
    note = _held_out_note(models["merge"], settings, prepared, records)
    if note:
        progress.log(f"warning: quality is not of held-out text: {note}")
    about = {"held_out": not note} | ({"held_out_note": note} if note else {})
    worst = max(row["nats_per_byte"] for row in rows[:-1])
    if rows[-1]["nats_per_byte"] <= WORSE * worst:
        return {"quality": rows, **about}
    warning = (
        f"the merge predicts held-out text far worse than its worst parent: "
        f"{rows[-1]['nats_per_byte']:.3f} against {worst:.3f} nats a byte"
    )
    progress.log(f"warning: {warning}")
    return {"quality": rows, **about, "warning": warning}


def _held_out_note(
    view: Any, settings: MergeSettings, prepared: Prepared, records: Sequence[dict[str, Any]]
) -> str:
    tokens = asked_tokens(settings, prepared)
    tokenizer, length = load_tokenizer(view.path), min(settings.sequence_length, tokens)
    text = evaluation_rows(
        tokenizer,
        settings.data,
        tokens=tokens,
        sequence_length=row_length(length, dict(view.config)),
        seed=settings.seed,
        bos=settings.bos,
    )
    return held_out_note(tokenizer, [text.rows], text.shared, records)


def texts_of_parents(prepared: Prepared, settings: MergeSettings) -> list[HeldOut]:
    """The held-out text of every parent, read before the merge is made.

    Raises:
        CheckpointError: a parent has no tokenizer.
        DataError: the text is missing or too short.
    """
    return [_text(view, settings, prepared) for view in prepared.merge.plan.models]


def _text(view: Any, settings: MergeSettings, prepared: Prepared) -> HeldOut:
    tokens = asked_tokens(settings, prepared)
    length = min(settings.sequence_length, tokens)
    return HeldOut.of(
        view.path,
        view.config,
        data=settings.data,
        samples=-(-tokens // length),
        sequence_length=length,
        seed=settings.seed,
        bos=settings.bos,
        split="evaluation",
        device=settings.device,
    )


def _quality(view: Any, text: HeldOut) -> dict[str, float]:
    loss = text.loss_of(view.config, _Stored(view))
    read = load_tokenizer(view.path).batch_decode(text.rows[:, 1:])
    characters = sum(len(row.encode()) for row in read)
    predicted = text.rows[:, 1:].numel()
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "nats_per_byte": loss * predicted / max(characters, 1),
    }


@dataclass(frozen=True)
class _Stored(Mapping[str, Tensor]):
    """A model's tensors, read as they are asked for."""

    view: Any

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self.view.load(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.view.tensors)

    def __len__(self) -> int:
        return len(self.view.tensors)
