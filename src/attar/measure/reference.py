"""The reference that models are compared with: one set of logits for several evaluations.

int8 rounding costs a few millionths of a nat, so the logits are kept in float32 where they fit the memory
limit. Otherwise none are kept (``Reference.kept`` is False): the model stays loaded and recomputes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint import Checkpoint
from attar.checkpoint.lineage import texts_of
from attar.checkpoint.processes import SINGLE_PROCESS, Processes
from attar.data.auto import fit
from attar.data.seen import held_out_note
from attar.errors import UsageError
from attar.measure.generation import answer_prompts, generate_answers
from attar.measure.held_out import held_out_rows
from attar.measure.logits import next_token_logits, predicted, split
from attar.measure.metrics import kl
from attar.measure.multiple_choice import TaskAnswers
from attar.measure.noise import Bfloat16Products, noise_floor
from attar.measure.settings import EvaluateSettings
from attar.measure.subject import Subject, load_subject
from attar.measure.tasks import answer_tasks
from attar.progress import SILENT, Progress

MEMORY_LIMIT = 512 * 2**20
NOISE_ROWS = 8  # of which the noise floor is the mean: it differs little from row to row


@dataclass(frozen=True)
class Reference:
    """A reference model on one text.

    Attributes:
        subject: the reference model, without weights where the logits are kept.
        settings: of the evaluation; another text or length needs another reference.
        batches: the text, int64 (B, S) each.
        width: compared columns of the logits.
        shared: why the text is in other splits too, as in :class:`attar.data.packing.PackedRows`.
        logits: per batch and sequence, float32 (n, width), none for batches of other processes; None where
            each evaluation recomputes them.
        noise: fields of the noise floor (noise.py); none where it was not measured.
        tasks: answers to the questions of the settings' tasks, by file.
        prompts, answers: token ids of prompts and of their greedy answers; none without such settings, from a
            model that is not in memory, and in processes but the first.
    """

    subject: Subject
    settings: EvaluateSettings
    batches: list[Tensor]
    width: int
    logits: list[list[Tensor]] | None
    shared: str = ""
    noise: Mapping[str, Any] = field(default_factory=dict)
    tasks: Mapping[str, TaskAnswers] = field(default_factory=dict)
    prompts: Sequence[list[int]] = ()
    answers: Sequence[list[int]] = ()

    @property
    def kept(self) -> bool:
        """Whether the logits are in memory; else each evaluation recomputes them."""
        return self.logits is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the kept logits."""
        return sum(row.nbytes for rows in self.logits or [] for row in rows)

    def rows(self, batch: int) -> Iterator[Tensor]:
        """The reference's logits (n, width) for each sequence of a batch."""
        if self.logits is not None:
            yield from self.logits[batch]
        else:
            for logits, _ in next_token_logits(self.subject.model, self.batches[batch], self.width):
                yield logits


def make_reference(
    model: str | Path | Checkpoint | Subject,
    settings: EvaluateSettings,
    *,
    batches: list[Tensor] | None = None,
    memory_limit: int = MEMORY_LIMIT,
    processes: Processes = SINGLE_PROCESS,
    progress: Progress = SILENT,
) -> Reference:
    """Run the reference over the held-out text, and again for the noise floor where it computes in float32;
    it answers the questions, and some prompts.

    Args:
        batches: the text as int64 (B, S) batches; None: the settings' text, tokenized by the reference.
        memory_limit: bytes for kept logits; above it each evaluation recomputes them.
        processes: each runs a part of the batches.

    Raises:
        AttarError: the model or the text cannot be used.
    """
    subject = load_subject(model, dtype=settings.dtype, device=settings.device, larger=True)
    if subject.checkpoint is not None:
        settings = fit(settings, subject.checkpoint, progress)
    width, shared = subject.vocabulary, ""
    if batches is None:
        packed = held_out_rows(subject, settings)
        batches, shared = list(packed.rows.split(settings.batch_size)), packed.shared
    pieces = split(batches, width)
    assigned = range(processes.rank, len(pieces), processes.count)
    reference = Reference(subject, settings, pieces, width, None, shared)
    size = sum(int(predicted(pieces[number]).sum()) for number in assigned) * width * 4
    if size <= memory_limit:
        logits: list[list[Tensor]] = [[] for _ in pieces]
        with progress.task(f"reference {subject.name}", total=len(assigned)) as task:
            for number in assigned:
                rows = next_token_logits(subject.model, pieces[number], width)
                logits[number] = [row.to(device="cpu", dtype=torch.float32, copy=True) for row, _ in rows]
                task.advance()
        reference = replace(reference, logits=logits)
    if settings.noise_floor and subject.model.dtype == torch.float32:
        reference = replace(reference, noise=_noise(reference, assigned, processes, progress))
    tasks = answer_tasks(subject, settings, processes=processes, progress=progress)
    prompts: list[list[int]] = []
    if processes.first and subject.in_memory:
        prompts = answer_prompts(subject, settings.answers)
    answers = generate_answers(subject, prompts, settings.sample_tokens) if prompts else []
    reference = replace(reference, tasks=tasks, prompts=prompts, answers=answers)
    if reference.kept:
        bare = Subject(None, subject.tokenizer, subject.checkpoint, subject.name)
        reference = replace(reference, subject=bare)
    return reference


def _noise(reference: Reference, assigned: range, processes: Processes, progress: Progress) -> dict[str, Any]:
    """The noise floor on :data:`NOISE_ROWS` rows over all of the text; each process runs those of its
    batches."""
    subject, width = reference.subject, reference.width
    rows = [(number, row) for number, batch in enumerate(reference.batches) for row in range(len(batch))]
    chosen = rows[:: -(-len(rows) // NOISE_ROWS)]
    distances: dict[tuple[int, int], Tensor] = {}
    with progress.task(f"noise floor {subject.name}", total=len(chosen)) as task:
        for number, row in chosen:
            if number in assigned:
                tokens = reference.batches[number][row : row + 1]
                with Bfloat16Products():
                    noisy, _ = next(next_token_logits(subject.model, tokens, width))
                if reference.logits is not None:
                    exact = reference.logits[number][row]
                else:
                    exact, _ = next(next_token_logits(subject.model, tokens, width))
                distances[number, row] = kl(exact, noisy).cpu()
            task.advance()
    measured = [pair for part in processes.of_all(distances) for pair in part.items()]
    return noise_floor([values for _, values in sorted(measured, key=lambda pair: pair[0])])


def text_note(subject: Subject, settings: EvaluateSettings, reference: Reference | None) -> str:
    """Why the text of an evaluation is not held out for this model; empty where it is.

    Args:
        subject: the records of its lineage tell what was read.
        reference: its text is used; None: the settings' text.
    """
    if subject.tokenizer is None or subject.checkpoint is None:
        return ""
    if reference is not None:
        batches, shared = reference.batches, reference.shared
    else:
        packed = held_out_rows(subject, settings)
        batches, shared = [packed.rows], packed.shared
    return held_out_note(subject.tokenizer, batches, shared, texts_of(subject.checkpoint))


def check_same_text(reference: Reference, settings: EvaluateSettings) -> None:
    """Raise UsageError unless reference and settings have the same text."""
    for name in ("data", "tokens", "sequence_length", "seed", "bos"):
        ours, theirs = getattr(settings, name), getattr(reference.settings, name)
        if ours != theirs:
            raise UsageError(f"{name} is {ours!r} here, but the reference was made with {theirs!r}")


def check_same_tokens(subject: Subject, reference: Subject) -> None:
    """Raise UsageError unless both tokenizers have the same vocabulary (embeddings may be padded)."""
    if subject.tokenizer is None or reference.tokenizer is None:
        return
    ours, theirs = subject.tokenizer.get_vocab(), reference.tokenizer.get_vocab()
    if ours == theirs:
        return
    token = min(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    here, there = (repr(vocabulary.get(token, "missing")) for vocabulary in (ours, theirs))
    raise UsageError(
        f"{subject.name} and {reference.name} have different tokenizers: token {token!r} is {here} in one, "
        f"{there} in the other",
        hint="KL and top-1 agreement need one tokenizer; leave --reference out to get the perplexity",
    )
