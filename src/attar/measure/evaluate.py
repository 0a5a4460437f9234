"""Evaluate a checkpoint: quality, size, speed, memory and a sample, as one flat record.

Order matters for the memory figure: the model is loaded, speaks and is timed first, the peak is read, and
only then come the logits of the whole text.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint import Checkpoint
from attar.data.auto import AUTO, fit
from attar.errors import NumericsError
from attar.measure.divergence import agreement, kl, percentile
from attar.measure.forward import next_token_logits, split
from attar.measure.generation import complete, encode, words
from attar.measure.memory import peak_device_bytes, peak_rss_bytes, reset_peak
from attar.measure.perplexity import perplexity, token_losses
from attar.measure.reference import (
    Reference,
    check_same_text,
    check_same_tokens,
    held_out,
    make_reference,
    text_note,
)
from attar.measure.settings import EvaluateSettings
from attar.measure.size import measure_size
from attar.measure.speed import Speed, measure_speed
from attar.measure.subject import Subject, check_device, load_subject
from attar.progress import SILENT, Progress


@dataclass(frozen=True)
class Quality:
    """How well a model predicts a text, and how far it is from the reference.

    Attributes:
        loss: mean negative log-likelihood, nats per predicted token.
        tokens: how many were predicted.
        kl_mean, kl_p99: mean and 99th percentile of KL(reference || model) per token, in nats; None without a
            reference.
        top1_agreement: fraction of tokens where both would choose the same one, 0 to 1; None without a
            reference.
    """

    perplexity: float
    loss: float
    tokens: int
    kl_mean: float | None = None
    kl_p99: float | None = None
    top1_agreement: float | None = None


@dataclass(frozen=True, kw_only=True)
class Measurements(Quality):
    """All that ``attar evaluate`` measures.

    Attributes:
        model, reference: names.
        data: the text; held_out: no stage of the model's lineage has read any of it, as far as is recorded;
            held_out_note: what is against it, else empty.
        bytes: of the stored tensors; parameters: of the model they stand for; bits_per_weight: 8 * bytes /
            parameters.
        prefill_tokens_per_s, decode_tokens_per_s: medians; the spreads are (max - min) / median over the
            rounds.
        peak_rss_bytes: the most resident memory while the model was loaded, spoke and was timed, less the
            kept reference.
        peak_device_bytes: the most memory on the GPU in that time; None on a CPU.
        prompt, sample: greedy continuation of the prompt.
        dtype, device, threads: what the model was run in and on.
        seconds: the evaluation took so long.
    """

    model: str
    reference: str | None
    data: str
    held_out: bool
    held_out_note: str
    bytes: int
    parameters: int
    bits_per_weight: float
    prefill_tokens_per_s: float | None
    prefill_spread: float | None
    decode_tokens_per_s: float | None
    decode_spread: float | None
    peak_rss_bytes: int
    peak_device_bytes: int | None
    prompt: str | None
    sample: str | None
    dtype: str
    device: str
    threads: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """A flat dict of JSON values."""
        return asdict(self)


def evaluate(
    model: str | Path | Checkpoint | Subject,
    settings: EvaluateSettings | None = None,
    *,
    reference: str | Path | Checkpoint | Subject | Reference | None = None,
    progress: Progress = SILENT,
) -> Measurements:
    """Measure a causal language model.

    Args:
        reference: what the divergence is measured against: a model, or a :class:`Reference` that serves
            several evaluations. Both models read the same tokens, the reference's.

    Raises:
        UsageError: model and reference have different tokenizers.
        DataError: the text is missing, empty or too short.
        SettingsError: no such device.
        NumericsError: the model's logits are NaN.
        AttarError: the model cannot be loaded.
    """
    settings = settings or EvaluateSettings()
    if isinstance(reference, Reference):
        settings = replace(settings, data=reference.settings.data) if settings.data == AUTO else settings
        check_same_text(reference, settings)
    check_device(settings.device)
    start = time.monotonic()
    reset_peak(settings.device)
    subject = load_subject(model, dtype=settings.dtype, device=settings.device)
    if isinstance(reference, Reference):
        check_same_tokens(subject, reference.subject)
    sample = _sample(subject, settings)
    speed = _speed(subject, settings)
    peak, device_peak = peak_rss_bytes(), peak_device_bytes(settings.device)
    if isinstance(reference, Reference):
        peak -= reference.nbytes
    elif reference is not None:
        other = load_subject(reference, dtype=settings.dtype, device=settings.device)
        check_same_tokens(subject, other)
        reference = make_reference(other, settings, progress=progress)
    elif subject.checkpoint is not None:
        settings = fit(settings, subject.checkpoint, progress)
    note = text_note(subject, settings, reference)
    if note:
        progress.log(f"warning: {subject.name} is not measured on held-out text: {note}")
    quality = measure_quality(subject, settings, reference, progress=progress)
    size = measure_size(subject)
    return Measurements(
        **asdict(quality),
        **asdict(size),
        model=subject.name,
        reference=reference.subject.name if reference else None,
        data=reference.settings.data if reference else settings.data,
        held_out=not note,
        held_out_note=note,
        prefill_tokens_per_s=speed.prefill_tokens_per_s if speed else None,
        prefill_spread=speed.prefill_spread if speed else None,
        decode_tokens_per_s=speed.decode_tokens_per_s if speed else None,
        decode_spread=speed.decode_spread if speed else None,
        peak_rss_bytes=peak,
        peak_device_bytes=device_peak,
        prompt=settings.sample or None,
        sample=sample,
        dtype=str(subject.model.dtype).removeprefix("torch."),
        device=settings.device,
        threads=torch.get_num_threads(),
        seconds=time.monotonic() - start,
    )


def measure_quality(
    subject: Subject,
    settings: EvaluateSettings,
    reference: Reference | None = None,
    *,
    batches: list[Tensor] | None = None,
    progress: Progress = SILENT,
) -> Quality:
    """Perplexity, and the divergence from a reference.

    Args:
        batches: int64 (B, S) batches to read when there is no reference; None: the settings' text.

    Raises:
        NumericsError: a logit is NaN.
    """
    if reference is not None:
        pieces = reference.batches
    else:
        pieces = split(held_out(subject, settings) if batches is None else batches, subject.vocabulary)
    losses: list[Tensor] = []
    divergences: list[Tensor] = []
    agreed: list[Tensor] = []
    with progress.task(f"evaluate {subject.name}", total=len(pieces)) as task:
        for number, piece in enumerate(pieces):
            theirs = reference.rows(number) if reference else None
            for logits, labels in next_token_logits(subject.model, piece, subject.vocabulary):
                losses.append(token_losses(logits, labels).cpu())
                if theirs is not None:
                    row = next(theirs)
                    divergences.append(kl(row, logits).cpu())
                    agreed.append(agreement(row, logits).cpu())
            task.advance(loss=float(losses[-1].mean()))
    return _summary(subject.name, losses, divergences, agreed)


def _summary(name: str, losses: list[Tensor], divergences: list[Tensor], agreed: list[Tensor]) -> Quality:
    every = torch.cat(losses)
    loss = float(every.mean())
    if loss != loss:  # NaN
        raise NumericsError(
            f"{name} gives NaN logits for {int(every.isnan().sum())} of {every.numel()} tokens",
            hint="evaluate its parent: the stage that made it went wrong, or --dtype is too narrow",
        )
    if not divergences:
        return Quality(perplexity(loss), loss, every.numel())
    distances = torch.cat(divergences)
    return Quality(
        perplexity(loss),
        loss,
        every.numel(),
        float(distances.mean()),
        percentile(distances, 99.0),
        float(torch.cat(agreed).double().mean()),
    )


def _sample(subject: Subject, settings: EvaluateSettings) -> str | None:
    if not settings.sample or subject.tokenizer is None:
        return None
    prompt = encode(subject, settings.sample, "the sample's prompt")
    return words(subject, complete(subject, prompt, settings.sample_tokens))


def _speed(subject: Subject, settings: EvaluateSettings) -> Speed | None:
    if not settings.speed:
        return None
    return measure_speed(
        subject.model,
        vocabulary=subject.vocabulary,
        prompt_tokens=settings.prompt_tokens,
        decode_tokens=settings.decode_tokens,
        context=subject.context,
        seed=settings.seed,
    )
