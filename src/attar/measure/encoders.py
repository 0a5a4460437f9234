"""Evaluate an encoder: a classifier on labelled texts, a masked language model on hidden tokens.

The record is the record of language models (``evaluate.py``) with a class, or a hidden token, where they have
the next token: accuracy, perplexity and KL are over n predictions. A classifier reads all labelled texts of
the evaluation split (``whole:test.tsv``: of the file). F1 is of class 1, where there are two:

    F1 = 2 TP / (2 TP + FP + FN)

Encoders run in transformers, on decoded weights. Letters: n predictions, V classes or tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint import Checkpoint, open_checkpoint
from attar.checkpoint.lineage import texts_of
from attar.data.auto import fit
from attar.data.examples import Examples
from attar.data.labelled import classification_examples, labelled_note, labelled_split
from attar.data.masking import MaskRule, hide, masked_rows
from attar.data.packing import numbered_generator, row_length
from attar.data.seen import held_out_note
from attar.errors import NumericsError, SettingsError, UsageError
from attar.measure.comparison import Divergence, compare, compare_tokens, fraction
from attar.measure.metrics import hits, kl, likeliest, perplexity, token_losses
from attar.measure.noise import Bfloat16Products, noise_floor
from attar.measure.settings import EvaluateSettings
from attar.measure.subject import Subject, torch_dtype
from attar.measure.uncertainty import mean_stderr, ratio_stderr
from attar.models.classifiers import class_names_of, is_classifier
from attar.models.inputs import model_inputs
from attar.models.loading.fit import admit
from attar.models.loading.load import load_model, load_tokenizer
from attar.progress import SILENT, Progress

NOISE_TEXTS = 64  # of which the noise floor is the mean


def encoder_task(model: Any) -> str:
    """``classification`` or ``masked``, or nothing for any other model.

    Args:
        model: a path, an open checkpoint, or a subject in memory, which is none.
    """
    if not isinstance(model, str | Path | Checkpoint):
        return ""
    config = open_checkpoint(model).config
    if is_classifier(config):
        return "classification"
    architectures = config.get("architectures") or [""]
    return "masked" if str(architectures[0]).endswith("ForMaskedLM") else ""


@dataclass(frozen=True)
class EncoderReference:
    """A reference encoder's predictions of one text.

    Attributes:
        settings: of the evaluation.
        logits: float32 (n, V).
        noise: as of a :class:`attar.measure.reference.Reference`.
    """

    subject: Subject
    settings: EvaluateSettings
    logits: Tensor
    noise: Mapping[str, Any] = field(default_factory=dict)

    kept = True
    """Its logits are in memory; see :class:`attar.measure.reference.Reference`."""

    @property
    def nbytes(self) -> int:
        """Bytes of the logits."""
        return int(self.logits.nbytes)


@dataclass(frozen=True)
class EncoderText:
    """What an encoder is measured on, and why it is not held out (empty: it is)."""

    examples: Examples
    note: str


@dataclass(frozen=True, kw_only=True)
class EncoderQuality(Divergence):
    """Fields of :class:`attar.measure.evaluate.Measurements`, over n predictions."""

    task: str
    perplexity: float
    loss: float
    tokens: int
    accuracy: float
    f1: float | None


def load_encoder(model: str | Path | Checkpoint, settings: EvaluateSettings) -> Subject:
    """The encoder in transformers.

    Raises:
        SettingsError: a setting is of causal language models alone.
    """
    if settings.runner not in ("auto", "transformers"):
        raise SettingsError("runner", settings.runner, "transformers with an encoder")
    if settings.tasks:
        raise SettingsError("tasks", settings.tasks, "left out with an encoder")
    checkpoint = admit(model, text=True)
    loaded = load_model(
        checkpoint, dtype=torch_dtype(settings.dtype, settings.device), device=settings.device
    )
    return Subject(loaded, load_tokenizer(checkpoint), checkpoint, checkpoint.name)


def make_encoder_reference(
    model: str | Path | Checkpoint, settings: EvaluateSettings, progress: Progress = SILENT
) -> EncoderReference:
    """Run the reference over the settings' text."""
    subject = load_encoder(model, settings)
    assert subject.checkpoint is not None
    settings = fit(settings, subject.checkpoint, progress)
    examples = encoder_text(subject, settings).examples
    with progress.task(f"reference {subject.name}", total=len(examples)) as task:
        parts = []
        for logits, batch in predictions(subject, examples, settings.batch_size):
            parts.append(logits.float().cpu())
            task.advance(len(batch))
    noise: dict[str, Any] = {}
    if settings.noise_floor and subject.model.dtype == torch.float32:
        few = examples[:: -(-len(examples) // NOISE_TEXTS)]
        exact = torch.cat([logits for logits, _ in predictions(subject, few, settings.batch_size)])
        with Bfloat16Products():
            noisy = torch.cat([logits for logits, _ in predictions(subject, few, settings.batch_size)])
        noise = noise_floor(kl(exact, noisy).cpu().split(row_counts(few)))
    bare = Subject(None, subject.tokenizer, subject.checkpoint, subject.name)
    return EncoderReference(bare, settings, torch.cat(parts), noise)


def encoder_text(subject: Subject, settings: EvaluateSettings) -> EncoderText:
    """The settings' held-out text in the subject's tokens.

    Raises:
        DataError: the text is missing or too short; a line without a label, or with one that the model lacks.
    """
    checkpoint = subject.checkpoint
    assert checkpoint is not None
    length = row_length(settings.sequence_length, checkpoint.config)
    if is_classifier(checkpoint.config):
        chosen = labelled_split(settings.data, "evaluation", settings.seed)
        names = class_names_of(subject.model.config, subject.name)
        examples = classification_examples(subject.tokenizer, chosen.rows, names, length)
        return EncoderText(examples, labelled_note(chosen, texts_of(checkpoint)))
    count = max(settings.tokens // length, 1)
    packed = masked_rows(
        subject.tokenizer, settings.data, "evaluation", length=length, rows=count, seed=settings.seed
    )
    examples = hide(packed.rows, MaskRule.of(subject.tokenizer), numbered_generator(settings.seed, 0))
    note = held_out_note(subject.tokenizer, [packed.rows], packed.shared, texts_of(checkpoint))
    return EncoderText(examples, note)


def row_counts(examples: Examples) -> list[int]:
    """Predictions of each row."""
    counts: list[int] = examples.predicted.view(len(examples), -1).sum(1).tolist()
    return counts


def predictions(subject: Subject, examples: Examples, size: int) -> Iterator[tuple[Tensor, Examples]]:
    """Logits (n, V) of the predictions of every batch of ``size`` rows, and the batch."""
    for part in examples.split(size):
        batch = part.trimmed().to(subject.model.device)
        with torch.inference_mode():
            logits = subject.model(**model_inputs(subject.model, batch)).logits[batch.predicted]
        yield logits, batch


def measure_encoder(
    subject: Subject,
    text: EncoderText,
    settings: EvaluateSettings,
    reference: EncoderReference | None,
    progress: Progress = SILENT,
) -> tuple[EncoderQuality, float]:
    """Quality, and tokens per second of the pass.

    Raises:
        NumericsError: a logit is NaN.
    """
    losses, correct, chosen, compared, counts = ([], [], [], [], [])  # type: ignore[var-annotated]
    start, seconds = 0, 0.0
    with progress.task(f"evaluate {subject.name}", total=len(text.examples)) as task:
        begin = time.monotonic()
        for logits, batch in predictions(subject, text.examples, settings.batch_size):
            seconds += time.monotonic() - begin
            labels = batch.labels
            losses.append(token_losses(logits, labels).cpu())
            correct.append(hits(logits, labels).cpu())
            chosen.append(likeliest(logits).cpu())
            if reference is not None:
                theirs = reference.logits[start : start + len(logits)]
                compared.append(compare_tokens(theirs, logits, labels))
                counts.append(row_counts(batch))
            start += len(logits)
            task.advance(len(batch), loss=float(losses[-1].mean()) if len(logits) else 0.0)
            begin = time.monotonic()
    loss = float(torch.cat(losses).mean())
    if loss != loss:  # NaN
        raise NumericsError(
            f"{subject.name} gives NaN logits", hint="evaluate its parent, or another --dtype"
        )
    task_name, labels = encoder_task(subject.checkpoint), text.examples.labels
    binary = task_name == "classification" and subject.model.config.num_labels == 2
    comparison = Divergence()
    if reference is not None:
        rows = [row for part, sizes in zip(compared, counts, strict=True) for row in part.split(sizes)]
        theirs = torch.cat([part.reference_right for part in compared])
        comparison = replace(  # a row is too short for blocks of tokens
            compare(rows),
            kl_mean_stderr=mean_stderr([part.kl for part in compared]),
            quality_kept_stderr=ratio_stderr([torch.cat(correct)], [theirs]),
            **reference.noise,
        )
    quality = EncoderQuality(
        **vars(comparison),
        task=task_name,
        perplexity=perplexity(loss),
        loss=loss,
        tokens=start,
        accuracy=fraction(correct),
        f1=f1_score(torch.cat(chosen), labels) if binary else None,
    )
    return quality, int(text.examples.mask.sum()) / seconds


def f1_score(chosen: Tensor, labels: Tensor) -> float:
    """F1 of class 1; 0 where it never occurs."""
    right = int(((chosen == 1) & (labels == 1)).sum())
    total = int((chosen == 1).sum()) + int((labels == 1).sum())
    return 2 * right / total if total else 0.0


def check_same_kind(subject: Subject, reference: Any) -> None:
    """Raise UsageError unless the reference is an encoder with the same classes or tokens."""
    if not isinstance(reference, EncoderReference):
        raise UsageError(f"{subject.name} is an encoder, the reference is none")
    config, other = (item.checkpoint.config for item in (subject, reference.subject) if item.checkpoint)
    if encoder_task(subject.checkpoint) != encoder_task(reference.subject.checkpoint):
        raise UsageError(
            f"{subject.name} is a {config['architectures'][0]}, the reference a {other['architectures'][0]}"
        )
    width = getattr(subject.model.config, "num_labels", 0)
    if is_classifier(config) and reference.logits.shape[1] != width:
        raise UsageError(f"{subject.name} has {width} classes, the reference {reference.logits.shape[1]}")
