"""Evaluate a checkpoint: quality, size, speed, memory and a sample, as one flat record.

The model runs in what serves it, with the activations and the keys and values of that runner, so that what a
user gets is what is measured; the reference runs in transformers.

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
from attar.measure.footprint import measure_size, peak_device_bytes, peak_rss_bytes, reset_peak
from attar.measure.generation import Speed, decode_tokens, generate_greedily, measure_speed, sample_prompt
from attar.measure.logits import split, subject_logits
from attar.measure.metrics import agreement, hits, kl, percentile, perplexity, token_losses
from attar.measure.multiple_choice import TaskScore, measure_task, read_questions
from attar.measure.reference import (
    Reference,
    check_same_text,
    check_same_tokens,
    held_out,
    make_reference,
    text_note,
)
from attar.measure.settings import EvaluateSettings
from attar.measure.subject import Subject, check_device, load_subject, serving_formats
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
        accuracy: fraction of tokens that the model finds likeliest, 0 to 1.
        quality_kept: accuracy over the reference's; None without a reference, or where it is never right.
    """

    perplexity: float
    loss: float
    tokens: int
    kl_mean: float | None = None
    kl_p99: float | None = None
    top1_agreement: float | None = None
    accuracy: float | None = None
    quality_kept: float | None = None


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
            rounds, None of one round.
        transformers_prefill_tokens_per_s, transformers_decode_tokens_per_s: of transformers on the decoded
            weights, where asked for.
        peak_rss_bytes: the most resident memory while the model was loaded, spoke and was timed, less the
            kept reference.
        peak_device_bytes: the most memory on the GPU in that time; None on a CPU.
        prompt, sample: greedy continuation of the prompt.
        runner: compiled, modules or transformers: what computed all of this but the reference.
        runner_note: why it is transformers though the runtime was asked for; None where it is not.
        activations, kv_dtype: what the runner's products round their inputs to, and how it keeps keys and
            values.
        device, threads: where it ran.
        tasks: accuracy on multiple-choice questions, one for each file.
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
    transformers_prefill_tokens_per_s: float | None
    transformers_decode_tokens_per_s: float | None
    peak_rss_bytes: int
    peak_device_bytes: int | None
    prompt: str | None
    sample: str | None
    runner: str
    runner_note: str | None
    activations: str
    kv_dtype: str
    device: str
    threads: int
    tasks: tuple[TaskScore, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """A dict of JSON values, flat but for ``tasks``."""
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
        DataError: the text is missing, empty or too short, or a file of questions has a bad line.
        SettingsError: no such device.
        NumericsError: the model's logits are NaN.
        AttarError: the model cannot be loaded.
    """
    settings = settings or EvaluateSettings()
    if isinstance(reference, Reference):
        settings = replace(settings, data=reference.settings.data) if settings.data == AUTO else settings
        check_same_text(reference, settings)
    check_device(settings.device)
    questions = {file: read_questions(file, settings.tasks_limit) for file in settings.tasks}
    start = time.monotonic()
    reset_peak(settings.device)
    where = {"dtype": settings.dtype, "device": settings.device}
    how = {name: getattr(settings, name) for name in ("runner", "kv_dtype", "activations")}
    subject = load_subject(model, **how, **where)
    if isinstance(reference, Reference):
        check_same_tokens(subject, reference.subject)
    prompt, sample = _sample(subject, settings)
    speed = _speed(subject, settings) if settings.speed else None
    peak, device_peak = peak_rss_bytes(), peak_device_bytes(settings.device)
    if isinstance(reference, Reference):
        peak -= reference.nbytes
    elif reference is not None:
        other = load_subject(reference, **where)
        check_same_tokens(subject, other)
        reference = make_reference(other, settings, progress=progress)
    elif subject.checkpoint is not None:
        settings = fit(settings, subject.checkpoint, progress)
    note = text_note(subject, settings, reference)
    if note:
        progress.log(f"warning: {subject.name} is not measured on held-out text: {note}")
    quality = measure_quality(subject, settings, reference, progress=progress)
    tasks = tuple(measure_task(subject, file, rows, progress=progress) for file, rows in questions.items())
    plain = _transformers_speed(model, subject, settings)
    return Measurements(
        **asdict(quality),
        **asdict(measure_size(subject)),
        **asdict(serving_formats(subject)),
        model=subject.name,
        reference=reference.subject.name if reference else None,
        data=reference.settings.data if reference else settings.data,
        held_out=not note,
        held_out_note=note,
        prefill_tokens_per_s=speed.prefill_tokens_per_s if speed else None,
        prefill_spread=speed.prefill_spread if speed else None,
        decode_tokens_per_s=speed.decode_tokens_per_s if speed else None,
        decode_spread=speed.decode_spread if speed else None,
        transformers_prefill_tokens_per_s=plain.prefill_tokens_per_s if plain else None,
        transformers_decode_tokens_per_s=plain.decode_tokens_per_s if plain else None,
        peak_rss_bytes=peak,
        peak_device_bytes=device_peak,
        prompt=prompt,
        sample=sample,
        runner_note=subject.why or None,
        device=settings.device,
        threads=torch.get_num_threads(),
        tasks=tasks,
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
    right: list[Tensor] = []
    best: list[Tensor] = []  # whether the reference is right
    with progress.task(f"evaluate {subject.name}", total=len(pieces)) as task:
        for number, piece in enumerate(pieces):
            theirs = reference.rows(number) if reference else None
            for logits, labels in subject_logits(subject, piece, subject.vocabulary):
                losses.append(token_losses(logits, labels).cpu())
                right.append(hits(logits, labels).cpu())
                if theirs is not None:
                    row = next(theirs)
                    best.append(hits(row, labels).cpu())
                    divergences.append(kl(row, logits).cpu())
                    agreed.append(agreement(row, logits).cpu())
            task.advance(loss=float(losses[-1].mean()))
    quality = _predicted(subject.name, losses, right)
    return _compared(quality, divergences, agreed, best) if divergences else quality


def _predicted(name: str, losses: list[Tensor], right: list[Tensor]) -> Quality:
    """How well the text is predicted: of each sequence losses (n,) and hits (n,)."""
    every = torch.cat(losses)
    loss = float(every.mean())
    if loss != loss:  # NaN
        raise NumericsError(
            f"{name} gives NaN logits for {int(every.isnan().sum())} of {every.numel()} tokens",
            hint="evaluate its parent: the stage that made it went wrong, or --dtype is too narrow",
        )
    return Quality(perplexity(loss), loss, every.numel(), accuracy=_share(right))


def _compared(
    quality: Quality, divergences: list[Tensor], agreed: list[Tensor], best: list[Tensor]
) -> Quality:
    """The same with what only a comparison with the reference says."""
    distances, theirs = torch.cat(divergences), _share(best)
    return replace(
        quality,
        kl_mean=float(distances.mean()),
        kl_p99=percentile(distances, 99.0),
        top1_agreement=_share(agreed),
        quality_kept=quality.accuracy / theirs if theirs and quality.accuracy is not None else None,
    )


def _share(parts: list[Tensor]) -> float:
    """The fraction of what is true."""
    return float(torch.cat(parts).double().mean())


def _sample(subject: Subject, settings: EvaluateSettings) -> tuple[str | None, str | None]:
    """The prompt as people read it, and what the model says after it; None for none."""
    if not settings.sample or subject.tokenizer is None:
        return None, None
    text, ids = sample_prompt(subject, settings.sample)
    return text, decode_tokens(subject, generate_greedily(subject, ids, settings.sample_tokens))


def _speed(subject: Subject, settings: EvaluateSettings) -> Speed:
    return measure_speed(
        subject,
        prompt_tokens=settings.prompt_tokens,
        decode_tokens=settings.decode_tokens,
        seed=settings.seed,
    )


def _transformers_speed(
    model: str | Path | Checkpoint | Subject, subject: Subject, settings: EvaluateSettings
) -> Speed | None:
    """The same of transformers on the decoded weights, which are loaded for it."""
    if not settings.reference_speed:
        return None
    if subject.loaded is None:
        return _speed(subject, settings)
    source = subject.checkpoint if isinstance(model, Subject) else model
    assert source is not None, "the runtime loads checkpoints only"
    return _speed(load_subject(source, dtype=settings.dtype, device=settings.device), settings)
