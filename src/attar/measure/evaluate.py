"""Evaluate a checkpoint: quality, size, speed, memory and a sample, as one flat record.

The model runs in the engine that serves it, with that runner's activations and KV cache, so the figures are
what a user gets; the reference runs in transformers.

The order matters for the memory figure: the model is loaded, generates the sample and is timed, then the peak
is read, and only then the logits of the whole text are computed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attar.checkpoint import Checkpoint
from attar.checkpoint.processes import SINGLE_PROCESS, Processes
from attar.data.auto import AUTO, fit
from attar.errors import NumericsError, UsageError
from attar.measure.comparison import (
    AnswerAgreement,
    Divergence,
    TokenComparison,
    compare,
    compare_answers,
    compare_tokens,
    fraction,
)
from attar.measure.encoders import (
    EncoderReference,
    check_same_kind,
    encoder_task,
    encoder_text,
    load_encoder,
    make_encoder_reference,
    measure_encoder,
)
from attar.measure.footprint import measure_size, peak_device_bytes, reset_peak
from attar.measure.generation import (
    Speed,
    decode_tokens,
    generate_answers,
    generate_greedily,
    measure_speed,
    sample_prompt,
)
from attar.measure.held_out import held_out
from attar.measure.logits import split, subject_logits
from attar.measure.metrics import hits, perplexity, token_losses
from attar.measure.multiple_choice import TaskScore, task_score
from attar.measure.notebook import frame, html_table
from attar.measure.numbers import nats_with_interval, percent, significant, size
from attar.measure.reference import (
    Reference,
    check_same_text,
    check_same_tokens,
    make_reference,
    text_note,
)
from attar.measure.settings import EvaluateSettings
from attar.measure.subject import Subject, check_device, load_subject, serving_formats
from attar.measure.tasks import answer_tasks, check_tasks
from attar.memory import peak_rss_bytes
from attar.progress import SILENT, Progress

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, kw_only=True)
class Quality(Divergence):
    """How well a model predicts a text, and its distance from the reference.

    Attributes:
        loss: mean negative log-likelihood, nats per predicted token.
        accuracy: fraction of tokens that are the model's likeliest.
    """

    perplexity: float
    loss: float
    tokens: int
    accuracy: float | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Measurements(Quality, AnswerAgreement):
    """All that ``attar evaluate`` measures.

    Attributes:
        held_out: no stage of the model's lineage has read any of the text, as far as its records tell.
        held_out_note: why it is not held out; else empty.
        bytes: of the stored tensors; parameters: of the dense model; bits_per_weight: 8 * bytes / parameters.
        prefill_tokens_per_s, decode_tokens_per_s: medians; the spreads are (max - min) / median over the
            rounds, None for a single round.
        transformers_prefill_tokens_per_s, transformers_decode_tokens_per_s: of transformers on the decoded
            weights, with ``reference_speed``.
        peak_rss_bytes: peak resident memory while the model was loaded, generated the sample and was timed,
            without the kept reference logits; block by block, the memory of its passes.
        peak_device_bytes: peak GPU memory in that time; None on a CPU.
        prompt, sample: a prompt and its greedy completion.
        runner: the engine of all figures but the reference: compiled, modules, transformers or blocks.
        runner_note: why transformers or blocks run the model although the runtime was asked for; else None.
        activations, kv_dtype: precision of the inputs of matrix products, and of the KV cache.
        tasks: accuracy on multiple-choice questions, one entry for each file.
        task: what is predicted: causal (next tokens), masked (hidden tokens) or classification (classes).
        f1: of class 1, for classifiers with two; else None.
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
    task: str = "causal"
    f1: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """A dict of JSON values, flat but for lists."""
        return asdict(self)

    def to_frame(self) -> pandas.DataFrame:
        """One row, indexed by the model."""
        return frame({self.model: self.to_dict()})

    def __repr__(self) -> str:
        return f"Measurements({self.model!r}: {', '.join(' '.join(pair) for pair in self._figures())})"

    def _repr_html_(self) -> str:
        names, values = zip(*self._figures(), strict=True)
        return html_table([("model", *names), (self.model, *values)])

    def _figures(self) -> list[tuple[str, str]]:
        """The figures that a reader looks at first."""
        kept = None if self.quality_kept is None else f"{percent(self.quality_kept, 1)} %"
        divergence = None
        if self.kl_mean is not None:
            divergence = f"{nats_with_interval(self.kl_mean, self.kl_mean_row_stderr)} nats"
        figures = {"size": size(self.bytes), "KL": divergence, "quality kept": kept}
        if self.task == "causal":
            speed = self.decode_tokens_per_s
            figures["perplexity"] = significant(self.perplexity)
            figures["decode tok/s"] = None if speed is None else significant(speed)
        else:
            figures["accuracy"] = None if self.accuracy is None else f"{percent(self.accuracy, 1)} %"
        return [(name, value) for name, value in figures.items() if value is not None]


def evaluate(
    model: str | Path | Checkpoint | Subject,
    settings: EvaluateSettings | None = None,
    *,
    reference: str | Path | Checkpoint | Subject | Reference | EncoderReference | None = None,
    processes: Processes = SINGLE_PROCESS,
    progress: Progress = SILENT,
) -> Measurements:
    """Measure a language model, or an encoder (encoders.py).

    Args:
        processes: they share the text and the questions; the first one alone generates the sample and is
            timed. An encoder is measured by one process.
        reference: what the divergence is measured against: a model, or a :class:`Reference` shared by
            several evaluations. Both models read the same tokens, those of the reference's tokenizer.

    Raises:
        UsageError: model and reference have different tokenizers, or several processes an encoder.
        DataError: the text is missing, empty or too short, or a file of questions has a bad line.
        SettingsError: no such device.
        NumericsError: the model's logits are NaN.
        MemoryNeededError: the model is larger than memory, and a runner was named that holds all of it.
        AttarError: the model cannot be loaded.
    """
    settings = settings or EvaluateSettings()
    check_device(settings.device)
    if not isinstance(model, Subject) and encoder_task(model):
        if processes.count > 1:
            raise UsageError("an encoder is measured by one process", hint="leave out --launch")
        return _evaluate_encoder(model, settings, reference, progress)
    if isinstance(reference, EncoderReference):
        raise UsageError("the reference is an encoder, the model is none")
    if isinstance(reference, Reference):
        settings = replace(settings, data=reference.settings.data) if settings.data == AUTO else settings
        check_same_text(reference, settings)
    check_tasks(settings)
    start = time.monotonic()
    reset_peak(settings.device)
    placement = {"dtype": settings.dtype, "device": settings.device}
    formats = {name: getattr(settings, name) for name in ("runner", "kv_dtype", "activations")}
    subject = load_subject(model, **formats, **placement, larger=settings.runner == "auto")
    if isinstance(reference, Reference):
        check_same_tokens(subject, reference.subject)
    if not subject.in_memory:
        settings = _without_decoding(subject, settings, progress)
    prompt, sample = _sample(subject, settings) if processes.first else (None, None)
    speed = _speed(subject, settings) if settings.speed and processes.first else None
    processes.wait()  # nothing runs beside what is timed
    peak, device_peak = peak_rss_bytes(), peak_device_bytes(settings.device)
    if isinstance(reference, Reference):
        peak -= reference.nbytes
    elif reference is not None:
        reference_subject = load_subject(reference, **placement, larger=True)
        check_same_tokens(subject, reference_subject)
        reference = make_reference(reference_subject, settings, processes=processes, progress=progress)
    elif subject.checkpoint is not None:
        settings = fit(settings, subject.checkpoint, progress)
    note = text_note(subject, settings, reference)
    if note:
        progress.log(f"warning: {subject.name} is not measured on held-out text: {note}")
    quality = measure_quality(subject, settings, reference, processes=processes, progress=progress)
    if not subject.in_memory:
        peak = peak_rss_bytes()
    tasks = answer_tasks(subject, settings, processes=processes, progress=progress)
    known = reference.tasks if reference and reference.settings.tasks_limit == settings.tasks_limit else {}
    transformers_speed = _transformers_speed(model, subject, settings) if processes.first else None
    return Measurements(
        **vars(quality),
        **vars(_answers(subject, reference)),
        **asdict(measure_size(subject)),
        **asdict(serving_formats(subject)),
        **_speeds(speed, transformers_speed),
        model=subject.name,
        reference=reference.subject.name if reference else None,
        data=reference.settings.data if reference else settings.data,
        held_out=not note,
        held_out_note=note,
        peak_rss_bytes=peak,
        peak_device_bytes=device_peak,
        prompt=prompt,
        sample=sample,
        runner_note=subject.fallback_reason or None,
        device=settings.device,
        threads=torch.get_num_threads(),
        tasks=tuple(task_score(file, right, known.get(file)) for file, right in tasks.items()),
        seconds=time.monotonic() - start,
    )


def prepare_reference(
    model: str | Path | Checkpoint, settings: EvaluateSettings, *, progress: Progress = SILENT
) -> Reference | EncoderReference:
    """What several evaluations are compared with: predictions of a language model, or of an encoder."""
    if encoder_task(model):
        return make_encoder_reference(model, settings, progress)
    return make_reference(model, settings, progress=progress)


def _evaluate_encoder(
    model: str | Path | Checkpoint, settings: EvaluateSettings, reference: Any, progress: Progress
) -> Measurements:
    start = time.monotonic()
    reset_peak(settings.device)
    subject = load_encoder(model, settings)
    assert subject.checkpoint is not None
    if isinstance(reference, str | Path | Checkpoint):
        reference = prepare_reference(reference, settings, progress=progress)
    if reference is not None:
        check_same_kind(subject, reference)
        check_same_tokens(subject, reference.subject)
        settings = replace(settings, data=reference.settings.data)
    settings = fit(settings, subject.checkpoint, progress)
    text = encoder_text(subject, settings)
    if text.note:
        progress.log(f"warning: {subject.name} is not measured on held-out text: {text.note}")
    quality, rate = measure_encoder(subject, text, settings, reference, progress)
    return Measurements(
        **vars(quality),
        **asdict(measure_size(subject)),
        **asdict(serving_formats(subject)),
        **_speeds(None, None) | {"prefill_tokens_per_s": rate if settings.speed else None},
        model=subject.name,
        reference=None if reference is None else reference.subject.name,
        data=settings.data,
        held_out=not text.note,
        held_out_note=text.note,
        peak_rss_bytes=peak_rss_bytes(),
        peak_device_bytes=peak_device_bytes(settings.device),
        prompt=None,
        sample=None,
        runner_note=None,
        device=settings.device,
        threads=torch.get_num_threads(),
        tasks=(),
        seconds=time.monotonic() - start,
    )


def measure_quality(
    subject: Subject,
    settings: EvaluateSettings,
    reference: Reference | None = None,
    *,
    batches: list[Tensor] | None = None,
    processes: Processes = SINGLE_PROCESS,
    progress: Progress = SILENT,
) -> Quality:
    """Perplexity, and the divergence from a reference.

    Args:
        batches: int64 (B, S) batches to read when there is no reference; None: the settings' text.
        processes: each runs a part of the batches; all get the quality on all.

    Raises:
        NumericsError: a logit is NaN.
    """
    if reference is not None:
        pieces = reference.batches
    else:
        pieces = split(held_out(subject, settings) if batches is None else batches, subject.vocabulary)
    assigned = range(processes.rank, len(pieces), processes.count)
    measured: dict[int, list[tuple[Tensor, Tensor, TokenComparison | None]]] = {}
    with progress.task(f"evaluate {subject.name}", total=len(assigned)) as task:
        for number in assigned:
            rows = subject_logits(subject, pieces[number], subject.vocabulary)
            reference_rows = reference.rows(number) if reference else None
            measured[number] = [
                _measured(logits, labels, None if reference_rows is None else next(reference_rows))
                for logits, labels in rows
            ]
            task.advance(loss=float(measured[number][-1][0].mean()))
    measured = {number: rows for part in processes.of_all(measured) for number, rows in part.items()}
    losses, correct, compared = zip(
        *(row for _, rows in sorted(measured.items()) for row in rows), strict=True
    )
    quality = _quality(subject.name, losses, correct, [row for row in compared if row is not None])
    return replace(quality, **reference.noise) if reference else quality


def _measured(
    logits: Tensor, labels: Tensor, reference: Tensor | None
) -> tuple[Tensor, Tensor, TokenComparison | None]:
    """Losses and hits (n,) of a sequence; with a reference's logits (n, V) the comparison too."""
    losses = token_losses(logits, labels).cpu()
    if reference is None:
        return losses, hits(logits, labels).cpu(), None
    compared = compare_tokens(reference, logits, labels)
    return losses, compared.right, compared


def _quality(
    name: str, losses: Sequence[Tensor], correct: Sequence[Tensor], compared: Sequence[TokenComparison]
) -> Quality:
    """From the losses (n,) and hits (n,) of each sequence, and from their comparisons where there is a
    reference."""
    all_losses = torch.cat(list(losses))
    loss = float(all_losses.mean())
    if loss != loss:  # NaN
        raise NumericsError(
            f"{name} gives NaN logits for {int(all_losses.isnan().sum())} of {all_losses.numel()} tokens",
            hint="evaluate its parent: its last stage went wrong, or --dtype is too narrow",
        )
    return Quality(
        **vars(compare(compared) if compared else Divergence()),
        perplexity=perplexity(loss),
        loss=loss,
        tokens=all_losses.numel(),
        accuracy=fraction(correct),
    )


def _without_decoding(subject: Subject, settings: EvaluateSettings, progress: Progress) -> EvaluateSettings:
    """What can be measured of a model of which one block is in memory: quality."""
    reason = f": {subject.fallback_reason}" if subject.fallback_reason else ""
    progress.log(f"{subject.name} runs block by block, without a sample and speed{reason}")
    return replace(settings, sample="", speed=False, reference_speed=False)


def _sample(subject: Subject, settings: EvaluateSettings) -> tuple[str | None, str | None]:
    """The prompt and its greedy completion, as text; None without a prompt or a tokenizer."""
    if not settings.sample or subject.tokenizer is None:
        return None, None
    text, ids = sample_prompt(subject, settings.sample)
    return text, decode_tokens(subject, generate_greedily(subject, ids, settings.sample_tokens))


def _answers(subject: Subject, reference: Reference | None) -> AnswerAgreement:
    """Its greedy answers beside the reference's, where that has some and the model can decode."""
    if reference is None or not reference.prompts or not subject.in_memory:
        return AnswerAgreement()
    answers = generate_answers(subject, list(reference.prompts), reference.settings.sample_tokens)
    return compare_answers(answers, reference.answers)


def _speeds(speed: Speed | None, transformers: Speed | None) -> dict[str, Any]:
    """Fields of the record: tokens per second and their spreads, None where not measured."""
    names = ("prefill_tokens_per_s", "prefill_spread", "decode_tokens_per_s", "decode_spread")
    fields = {name: getattr(speed, name, None) for name in names}
    for name in ("prefill_tokens_per_s", "decode_tokens_per_s"):
        fields[f"transformers_{name}"] = getattr(transformers, name, None)
    return fields


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
    """The speed of transformers on the decoded weights, which are loaded for it; None unless requested."""
    if not settings.reference_speed:
        return None
    if subject.loaded is None:
        return _speed(subject, settings)
    source = subject.checkpoint if isinstance(model, Subject) else model
    assert source is not None, "the runtime loads checkpoints only"
    return _speed(load_subject(source, dtype=settings.dtype, device=settings.device), settings)
