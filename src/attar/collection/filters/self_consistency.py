"""A vote over several samples of one prompt: Wang et al. 2022, "Self-Consistency Improves Chain of Thought
Reasoning in Language Models", arXiv 2203.11171.

    a* = arg max over a of the number of samples i with a_i = a         (section 2, unweighted)

Letters: a_i the final answer of sample i, a* the elected one.

The rows of a prompt whose final answer is a* are kept if their share is at least ``agreement`` and no other
answer has as many; else the whole prompt goes. A prompt with one sample has nothing to vote on and is kept.

Differs from the paper, which takes a* alone: the reasoning is what a student learns from, so all rows that
arrive at a* stay.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from attar.collection.filters.row import CollectedRow, answer_of, question_key
from attar.collection.filters.settings import FilterSettings
from attar.data.words import words

_MARKS = (
    re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}"),
    re.compile(r"####\s*(.+)"),
    re.compile(r"(?i)\bfinal answer\s*(?:is|:)?\s*:?\s*(.+)"),
    re.compile(r"(?i)\b(?:the|my|so the|correct) answer is\s*:?\s*(.+)"),
    re.compile(r"(?i)^\W*answer\s*:\s*(.+)", re.MULTILINE),
)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_CHOICE = re.compile(r"^\W*([A-Za-z])\W*(?:$|[).:\s])")


def self_consistency(rows: Sequence[CollectedRow], settings: FilterSettings) -> list[str]:
    """Reasons against rows; "" keeps one."""
    samples = defaultdict(list)
    for number, row in enumerate(rows):
        samples[question_key(row)].append(number)
    reasons = [""] * len(rows)
    for numbers in samples.values():
        answers = [final_answer(answer_of(rows[number])) for number in numbers]
        winner = elected(answers, settings.agreement)
        for number, answer in zip(numbers, answers, strict=True):
            if winner is None:
                reasons[number] = "the samples of the prompt do not agree"
            elif answer != winner:
                reasons[number] = "another final answer than most samples"
    return reasons


def elected(answers: Sequence[str], agreement: float) -> str | None:
    """a*: the most frequent answer; None if it is not alone in front or has too small a share."""
    (best, votes), *others = Counter(answers).most_common(2)
    tied = bool(others) and others[0][1] == votes
    return None if tied or votes < agreement * len(answers) else best


def final_answer(text: str) -> str:
    """What an answer arrives at: after its last mark (``\\boxed{}``, ``####``, "the answer is", "Answer:"),
    else its last number, else its last line; in one spelling."""
    for mark in _MARKS:
        if matches := mark.findall(text):
            return _spelled(str(matches[-1]))
    if numbers := _NUMBER.findall(text):
        return _spelled(numbers[-1])
    lines = [line for line in text.splitlines() if line.strip()]
    return _spelled(lines[-1]) if lines else ""


def _spelled(answer: str) -> str:
    """One spelling: a number without commas, units and trailing zeros, a choice's letter, else words."""
    answer = re.sub(r"[*_`$\\]", "", answer).strip()
    if choice := _CHOICE.match(answer):
        return choice[1].lower()
    numbers = list(_NUMBER.finditer(answer))
    if len(numbers) == 1 and len(words(answer[: numbers[0].start()])) <= 1:
        value = numbers[0][0].replace(",", "")
        return value.rstrip("0").rstrip(".") if "." in value else value
    return " ".join(words(answer))
