"""Recall over a long context: a word that a name was given, asked for at the end of held-out text.

    ... text. The word of Tokira is garden. text ... The word of Tokira is

The name is made up, the word one of ten that are drawn with it, and the sentence stands between 5 and 90 % of
the text. It is recalled if its first token has the highest logit of the ten words': a tenth of the cases by
chance. What a small cache or a rounding loses of long contexts shows here and hardly in KL, most of whose
tokens need the last few sentences alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from attar.checkpoint.processes import SINGLE_PROCESS, Processes
from attar.errors import DataError, SettingsError
from attar.measure.held_out import held_out_rows
from attar.measure.multiple_choice import TaskAnswers, last_logits
from attar.measure.settings import EvaluateSettings
from attar.measure.subject import Subject
from attar.progress import SILENT, Progress

RECALL = "recall"
LONGEST = 4096  # tokens of a case where no length is given
COUNT = 32  # cases
DEPTHS = 0.05, 0.9  # of the text before the sentence
CHOICES = 10
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
WORDS = (  # each begins with another token in most vocabularies
    "apple bridge candle desert engine forest garden hammer island jacket kitchen ladder mirror needle ocean "
    "pencil rabbit silver table window yellow button castle doctor eagle flower guitar honey lemon mountain"
)


@dataclass(frozen=True)
class RecallCase:
    """A prompt, the first tokens of the words to choose from in rising order, and the right one's index."""

    prompt: list[int]
    words: tuple[int, ...]
    label: int


def recall_length(task: str) -> int | None:
    """Tokens of a case of the task ``recall`` (0: what the context allows) or ``recall:TOKENS``; None for
    another task.

    Raises:
        SettingsError: TOKENS is no number of at least 64.
    """
    name, colon, length = task.partition(":")
    if name != RECALL:
        return None
    if colon and not (length.isdecimal() and int(length) >= 64):
        raise SettingsError("tasks", task, f"{RECALL}, or {RECALL}:TOKENS with at least 64 tokens")
    return int(length or 0)


def answer_recall(
    subject: Subject,
    task: str,
    settings: EvaluateSettings,
    *,
    processes: Processes = SINGLE_PROCESS,
    progress: Progress = SILENT,
) -> TaskAnswers:
    """Ask for the words of as many cases as the settings' held-out text and ``tasks_limit`` allow, 32 at
    most.

    Raises:
        DataError: the model has no tokenizer or one that does not know the words, the cases are longer than
            its context, or the text shorter than one of them.
    """
    cases = recall_cases(subject, task, settings)
    assigned, right = cases[processes.rank :: processes.count], list[float]()
    with progress.task(f"recall {subject.name}", total=len(assigned)) as bar:
        for case in assigned:
            (logits,) = last_logits(subject, [[*case.prompt, 0]], [1])
            chosen = int(logits[0, list(case.words)].argmax())
            right.append(float(chosen == case.label))
            bar.advance()
    parts = processes.of_all(right)
    ordered = [parts[number % processes.count][number // processes.count] for number in range(len(cases))]
    return TaskAnswers(tuple(ordered), tuple(ordered))


def recall_cases(subject: Subject, task: str, settings: EvaluateSettings) -> list[RecallCase]:
    """The cases of a task; the same for all models with one tokenizer. Raises as :func:`answer_recall`."""
    tokenizer, length = subject.tokenizer, recall_length(task)
    if tokenizer is None:
        raise DataError(f"{subject.name} has no tokenizer, and {task} is text")
    length = length or min(LONGEST, subject.context or LONGEST)
    if subject.context is not None and length > subject.context:
        raise DataError(f"{task}: the context of {subject.name} is {subject.context:,} tokens")
    count = min(COUNT, settings.tasks_limit or COUNT)
    long = replace(settings, sequence_length=length, tokens=count * length)
    rows = held_out_rows(subject, long).rows
    draw = random.Random(settings.seed)
    return [_case(tokenizer, row.tolist(), draw) for row in rows[:count]]


def _case(tokenizer: Any, text: list[int], draw: random.Random) -> RecallCase:
    """A sentence within the text, and the question in place of its last tokens."""
    name = "".join(draw.choice(CONSONANTS) + draw.choice(VOWELS) for _ in range(3)).title()
    question = f"\nThe word of {name} is"
    end = _encode(tokenizer, question)
    after = {word: _encode(tokenizer, f"{question} {word}")[len(end) :] for word in WORDS.split()}
    while len({tokens[0] for tokens in after.values()}) < CHOICES:  # a space, where that is a token, is asked
        ((shared, _),) = Counter(tokens[0] for tokens in after.values()).most_common(1)
        end = [*end, shared]
        after = {word: ids[1:] for word, ids in after.items() if ids[0] == shared and ids[1:]}
        if not after:
            raise DataError(f"the tokenizer does not tell {CHOICES} words of {RECALL} apart")
    firsts = {tokens[0]: word for word, tokens in after.items()}
    right, *others = draw.sample(list(firsts), CHOICES)
    words = tuple(sorted([right, *others]))
    sentence = _encode(tokenizer, f"{question} {firsts[right]}.\n")
    body = text[: len(text) - len(sentence) - len(end)]
    depth = round(len(body) * draw.uniform(*DEPTHS))
    return RecallCase([*body[:depth], *sentence, *body[depth:], *end], words, words.index(right))


def _encode(tokenizer: Any, text: str) -> list[int]:
    tokens: Sequence[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return list(tokens)
