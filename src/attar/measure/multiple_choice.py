"""Accuracy on multiple-choice questions, as lm-evaluation-harness computes it (EleutherAI, 0.4; ARC's form).

    context        "Question: {q}\\nAnswer:"
    continuation   " " + choice
    score          sum of ln p(token | tokens before it) over the continuation's tokens
    acc            the choice of the highest score is the right one
    acc_norm       the choice of the highest score / characters is

Context and continuation are tokenized together, with the tokenizer's special tokens; the continuation begins
after as many tokens as the context has alone. Sequences longer than the model's context lose their beginning.
All columns of the logits count. Standard errors are those of a mean: the sample's standard deviation over
the root of the number of questions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attar.checkpoint.processes import SINGLE_PROCESS, Processes
from attar.data.packing import PADDING
from attar.data.sources import json_rows
from attar.errors import DataError
from attar.measure.logits import next_token_logits
from attar.measure.metrics import hits, token_losses
from attar.measure.subject import Subject
from attar.progress import SILENT, Progress
from attar.runtime.scoring import prompt_logits

BATCH = 16  # sequences in a forward pass of transformers

ScoredPair = tuple[list[int], list[int]]
"""Tokens of a context, and of its scored continuation."""


@dataclass(frozen=True)
class MultipleChoice:
    """One question.

    Attributes:
        choices: at least two answers, none empty.
        label: index of the right one.
    """

    where: str
    text: str
    choices: tuple[str, ...]
    label: int


@dataclass(frozen=True)
class TaskAnswers:
    """Whether each question is answered rightly, 1.0 or 0.0, by ``acc`` and by ``acc_norm``."""

    acc: tuple[float, ...]
    acc_norm: tuple[float, ...]


@dataclass(frozen=True)
class TaskScore:
    """Accuracy on a file of questions, 0 to 1; standard errors are None for a single question.

    Attributes:
        name: the file's, without its ending.
        acc_difference, acc_norm_difference: accuracy less the reference's on the same questions; its error
            is that of the pairs. None without a reference.
        acc_lost, acc_won: fraction of questions that the reference answers rightly and the model wrongly,
            and the reverse; so of ``acc_norm``.
    """

    name: str
    questions: int
    acc: float
    acc_stderr: float | None
    acc_norm: float
    acc_norm_stderr: float | None
    acc_difference: float | None = None
    acc_difference_stderr: float | None = None
    acc_lost: float | None = None
    acc_won: float | None = None
    acc_norm_difference: float | None = None
    acc_norm_difference_stderr: float | None = None
    acc_norm_lost: float | None = None
    acc_norm_won: float | None = None


def read_questions(file: str | Path, limit: int = 0) -> list[MultipleChoice]:
    """Questions of a file of JSON lines: ``q``, ``choices`` and ``label`` (a number from 0, or A, B, ...).

    Args:
        limit: read only the first questions; 0: all.

    Raises:
        DataError: the file cannot be read, or a line is not a question; the message names file and line.
    """
    questions = [_question(where, row) for where, row in islice(json_rows(Path(file)), limit or None)]
    if not questions:
        raise DataError(
            f"{file}: no questions", hint='write {"q": ..., "choices": [...], "label": 0} in lines'
        )
    return questions


def _question(where: str, row: Any) -> MultipleChoice:
    if not isinstance(row, dict):
        raise DataError(f"{where}: a {type(row).__name__}, not an object with q, choices and label")
    text, choices = row.get("q"), row.get("choices")
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: 'q' must be the text of a question")
    if not isinstance(choices, list) or len(choices) < 2 or not all(map(_is_text, choices)):
        raise DataError(f"{where}: 'choices' must be two texts or more, none of them empty")
    return MultipleChoice(where, text, tuple(choices), _label(where, row.get("label"), len(choices)))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _label(where: str, value: object, choices: int) -> int:
    """Index of a choice, written as a number from 0 or a letter."""
    if isinstance(value, str) and len(value) == 1 and value.upper() in "ABCDEFGHIJKLMNOPQRSTUVWXYZ":
        value = ord(value.upper()) - ord("A")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < choices:
        last = f"0 to {choices - 1}, or A to {chr(ord('A') + choices - 1)}" if choices <= 26 else "from 0"
        raise DataError(f"{where}: 'label' is {value!r}, but there are {choices} choices: {last}")
    return value


def answer_task(
    subject: Subject,
    questions: Sequence[MultipleChoice],
    *,
    processes: Processes = SINGLE_PROCESS,
    progress: Progress = SILENT,
) -> TaskAnswers:
    """Answer questions.

    Args:
        processes: each answers a part of the questions; all get the answers to all.

    Raises:
        DataError: a choice is longer than the context, or the model has no tokenizer.
    """
    if subject.tokenizer is None:
        raise DataError(f"{subject.name} has no tokenizer, and questions are text")
    assigned = questions[processes.rank :: processes.count]
    pairs = [pair for question in assigned for pair in _pairs(subject, question)]
    scores = iter([score for score, _ in log_likelihoods(subject, pairs, progress=progress)])
    right: list[tuple[float, float]] = []
    for question in assigned:
        sums = np.array([next(scores) for _ in question.choices])
        lengths = np.array([float(len(choice)) for choice in question.choices])
        chosen = np.argmax(sums), np.argmax(sums / lengths)
        right.append((float(chosen[0] == question.label), float(chosen[1] == question.label)))
    parts = processes.of_all(right)
    ordered = [parts[number % processes.count][number // processes.count] for number in range(len(questions))]
    acc, acc_norm = zip(*ordered, strict=True)
    return TaskAnswers(acc, acc_norm)


def task_score(file: str | Path, answers: TaskAnswers, reference: TaskAnswers | None = None) -> TaskScore:
    """The score of a file of questions, beside the reference's answers to the same ones."""
    fields: dict[str, Any] = {}
    for name, right in vars(answers).items():
        fields[name], fields[f"{name}_stderr"] = _mean(right)
        if reference is not None:
            changes = [ours - theirs for ours, theirs in zip(right, getattr(reference, name), strict=True)]
            fields[f"{name}_difference"], fields[f"{name}_difference_stderr"] = _mean(changes)
            fields[f"{name}_lost"] = changes.count(-1.0) / len(changes)
            fields[f"{name}_won"] = changes.count(1.0) / len(changes)
    return TaskScore(name=Path(file).name.removesuffix(".jsonl"), questions=len(answers.acc), **fields)


def _mean(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.fmean(values), error


def _pairs(subject: Subject, question: MultipleChoice) -> Iterator[ScoredPair]:
    for number, choice in enumerate(question.choices):
        context, after = encode_pair(subject.tokenizer, f"Question: {question.text}\nAnswer:", f" {choice}")
        if not after or (subject.context is not None and len(after) > subject.context):
            raise DataError(
                f"{question.where}: choice {number} has {len(after):,} tokens, but the context of "
                f"{subject.name} is {subject.context}"
            )
        yield context, after


def encode_pair(tokenizer: Any, context: str, continuation: str) -> ScoredPair:
    """Tokens of a context (not empty) and of its continuation, which gets the context's trailing spaces."""
    stripped = context.rstrip()
    together = tokenizer(context + continuation, verbose=False)["input_ids"]
    before = tokenizer(stripped, verbose=False)["input_ids"]
    return before, together[len(before) :]


def log_likelihoods(
    subject: Subject, pairs: Sequence[ScoredPair], *, progress: Progress = SILENT
) -> list[tuple[float, bool]]:
    """For each pair the sum of ln p over the continuation, and whether greedy decoding gives it.

    Args:
        pairs: contexts and continuations of at least one token. The longest run first; the results have
            the order of the pairs.
    """
    longest = (subject.context or math.inf) + 1
    rows = [context + after for context, after in pairs]
    rows = [row if len(row) <= longest else row[-int(longest) :] for row in rows]
    order = sorted(range(len(pairs)), key=lambda number: -len(rows[number]))
    counts = [len(pairs[number][1]) for number in order]
    scored: dict[int, tuple[float, bool]] = {}
    with progress.task(f"questions {subject.name}", total=len(pairs)) as task:
        logits = last_logits(subject, [rows[number] for number in order], counts)
        for number, row in zip(order, logits, strict=True):
            labels = torch.tensor(pairs[number][1])
            scored[number] = -float(token_losses(row, labels).sum()), bool(hits(row, labels).all())
            task.advance()
    return [scored[number] for number in range(len(pairs))]


def last_logits(subject: Subject, rows: list[list[int]], counts: list[int]) -> Iterator[Tensor]:
    """Logits (count, vocabulary) that predict the last ``count`` tokens of each row."""
    if subject.loaded is not None:
        yield from prompt_logits(subject.loaded.runner, [row[:-1] for row in rows], counts)
        return
    width = int(subject.model.get_output_embeddings().weight.shape[0])
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        tokens = torch.full((len(batch), max(map(len, batch))), PADDING)
        for line, row in zip(tokens, batch, strict=True):
            line[: len(row)] = torch.tensor(row)
        runs = next_token_logits(subject.model, tokens, width)
        for (logits, _), count in zip(runs, counts[start : start + BATCH], strict=True):
            yield logits[-count:]
