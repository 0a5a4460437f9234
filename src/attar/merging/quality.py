"""How well every parent and the merge predict held-out text.

Loss on held-out text: how soups and searches compare merges, and how a merge's quality is measured.

    loss = -1/N sum_i ln p(t_i | t_<i)        nats a token, over the N tokens that are predicted

Encoders are scored on masked tokens, always at the same positions. A model is given as a checkpoint, or as
its tensors in memory with a ``config.json``, so that a search over fifty merges of a small model writes no
file. It runs in float32. Losses are rounded to a millionth of a nat: the last bits of a matrix product depend
on the number of threads, and must not decide between two equal merges. A loss that is not finite counts as
infinite.

Text is packed by one tokenizer once; losses of models with different vocabularies are not comparable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from attar.checkpoint.open import Checkpoint, open_checkpoint
from attar.data.packing import evaluation_rows, pack, row_length
from attar.data.seen import held_out_note
from attar.errors import DataError, ModelError
from attar.merging.adapters.apply import tokenizer_folder
from attar.merging.planning.model import ModelView
from attar.merging.planning.prepare import PreparedMerge
from attar.merging.settings import MergeSettings
from attar.models.loading.device import pick_device
from attar.models.loading.empty import empty_model
from attar.models.loading.load import load_model, load_tokenizer
from attar.models.loading.stored import stored_names
from attar.progress import Progress
from attar.walks.objectives import masked_token_loss, next_token_loss

DIGITS = 6
LOGIT_BYTES = 256 * 2**20  # of one pass, in float32


@dataclass(frozen=True)
class HeldOutText:
    """Packed text that no model is trained on, to compute losses on.

    Attributes:
        rows: int64 (N, S), S tokens a row; no padding.
        mask_token: id of the tokenizer's mask token; None where it has none.
    """

    rows: Tensor
    mask_token: int | None = None
    device: str = "cpu"

    @classmethod
    def of(
        cls,
        model: str | Path | Checkpoint,
        config: Mapping[str, Any],
        settings: MergeSettings,
        *,
        split: str = "calibration",
        tokens: int | None = None,
    ) -> HeldOutText:
        """Pack the text of the settings' data.

        Args:
            model: its tokenizer is used.
            config: content of a ``config.json``; rows are no longer than its context.
            split: ``calibration`` to choose by; ``evaluation`` is kept for measuring the result.
            tokens: how many; None: ``settings.samples`` rows.

        Raises:
            DataError: the source holds less than one row.
            CheckpointError: the model has no tokenizer.
        """
        tokenizer = load_tokenizer(model)
        length = min(settings.sequence_length, tokens or settings.sequence_length)
        samples = -(-tokens // length) if tokens else settings.samples
        length = row_length(length, dict(config))
        packed = pack(
            tokenizer, settings.data, split, length=length, rows=samples, seed=settings.seed, bos=settings.bos
        )
        return cls(packed.rows, tokenizer.mask_token_id, settings.device)

    def loss(self, model: str | Path | Checkpoint) -> float:
        """Loss of a checkpoint. Raises as :func:`attar.models.loading.load.load_model`."""
        return self.score(load_model(model, dtype=torch.float32, device=self.device))

    def loss_of(self, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> float:
        """Loss of a model in memory. Nothing is written; the tensors are not changed.

        Args:
            config: content of its ``config.json``.
            state: its tensors by their stored names, of any float types.

        Raises:
            CheckpointError: a parameter has no tensor.
            ModelError: a tensor has another shape than the config asks for.
        """
        return self.score(fill(empty_model(config), state, pick_device(self.device)))

    def score(self, model: Any) -> float:
        """Loss of a loaded model in evaluation mode and on the device."""
        masked = type(model).__name__.endswith("ForMaskedLM")
        if (
            model.get_output_embeddings() is None
            or model.config.is_encoder_decoder
            or (masked and self.mask_token is None)
        ):
            raise ModelError(
                f"{type(model).__name__} with this tokenizer has no loss on plain text",
                hint="a search or a greedy soup needs a causal or masked language model",
            )
        total, count = 0.0, 0
        for number, batch in enumerate(self.batches(model)):
            with torch.inference_mode():
                if masked and self.mask_token is not None:
                    loss = masked_token_loss(model, batch, self.mask_token, seed=number)
                else:
                    loss = next_token_loss(model(input_ids=batch, use_cache=False).logits, batch)
            total += float(loss) * len(batch)
            count += len(batch)
        return round(total / count, DIGITS) if math.isfinite(total) else math.inf

    def batches(self, model: Any) -> Sequence[Tensor]:
        """The rows on the device, in batches whose logits fit in :data:`LOGIT_BYTES`."""
        vocabulary = model.get_input_embeddings().weight.shape[0]
        size = max(1, LOGIT_BYTES // (self.rows.shape[1] * vocabulary * 4))
        return list(self.rows.to(model.device).split(min(size, 8)))


def fill(model: nn.Module, state: Mapping[str, Tensor], device: torch.device) -> nn.Module:
    """Give an empty model (:func:`attar.models.loading.empty.empty_model`) its weights, in float32.

    The model is changed and returned; the tensors are not changed.

    Raises:
        CheckpointError: a parameter has no tensor.
        ModelError: one has another shape.
    """
    for name, stored in stored_names(model, SimpleNamespace(tensors=state, path="merge")).items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        wanted, value = getattr(owner, leaf).shape, state[stored]
        if value.shape != wanted:
            raise ModelError(f"{stored} is {list(value.shape)}, but the config asks for {list(wanted)}")
        setattr(owner, leaf, nn.Parameter(value.to(device, torch.float32), requires_grad=False))
    tie: Any = model
    tie.tie_weights()
    for _, buffer in model.named_buffers():
        buffer.data = buffer.data.to(device)
    return model.eval()


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
