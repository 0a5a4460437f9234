"""What a model writes, judged: by its teacher, and by how much it repeats itself.

    teacher's score      mean over drawn tokens of log p(y_t), p the teacher: of its text, minus its entropy
    repeated             fraction of 4-grams of an answer that are in it already (Welleck et al. 2019, arXiv
                         1908.04319, section 5.2: seq-rep-4), mean over answers
    distinct             different 2-grams of all answers, of all their 2-grams (Li et al. 2016, arXiv
                         1510.03055, section 5: distinct-2)

A model that says one good thing scores well and is not distinct; one that says anything is distinct.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import attar
from attar.checkpoint import open_checkpoint
from attar.data.packing import evaluation_rows
from attar.distillation.outputs import run_model
from attar.distillation.rollouts.sampling import completions
from attar.models.loading.load import load_model, load_tokenizer

ANSWERS, PROMPT, LENGTH = 64, 32, 96  # rows, tokens of text in front, tokens of a row
BATCH = 16


def judge(model: str | Path, teacher: str | Path, data: str, seed: int = 0) -> dict[str, float]:
    """The figures of :data:`ANSWERS` completions of held-out text at temperature 1."""
    tokenizer = load_tokenizer(open_checkpoint(teacher))
    text = evaluation_rows(tokenizer, data, tokens=ANSWERS * LENGTH, sequence_length=LENGTH, seed=0).rows
    prompts = text[:ANSWERS, :PROMPT].tolist()
    params = [
        attar.SamplingParams(max_tokens=LENGTH - PROMPT, seed=seed + row) for row in range(len(prompts))
    ]
    answers = [list(result.token_ids) for result in attar.LLM(model).generate(prompts, params)]
    return {
        "teacher_score": teacher_score(teacher, prompts, answers),
        "repeated": sum(repeated(answer) for answer in answers) / len(answers),
        "distinct": distinct(answers),
    }


def teacher_score(teacher: Any, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> float:
    """Mean log-probability of the answers' tokens."""
    model = load_model(open_checkpoint(teacher), dtype=torch.float32)
    rows = torch.full((len(prompts), LENGTH), -100)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        both = torch.tensor(prompt + answer)
        rows[row, : len(both)] = both
    total = torch.zeros((), dtype=torch.float64)
    examples = completions(rows, torch.tensor([len(prompt) for prompt in prompts]))
    for batch in examples.split(BATCH):
        with torch.no_grad():
            log_p = run_model(model, batch).predictions.log_softmax(-1)
        total += log_p.gather(1, batch.labels[:, None]).sum(dtype=torch.float64)
    return float(total / examples.count())


def repeated(answer: Sequence[int], n: int = 4) -> float:
    """Fraction of the n-grams that occurred before; 0 for a short answer."""
    grams = ngrams(answer, n)
    return 1.0 - len(frozenset(grams)) / len(grams) if grams else 0.0


def distinct(answers: Sequence[Sequence[int]], n: int = 2) -> float:
    """Fraction of the n-grams of all answers that are different."""
    grams = [gram for answer in answers for gram in ngrams(answer, n)]
    return len(frozenset(grams)) / max(len(grams), 1)


def ngrams(tokens: Sequence[int], n: int) -> list[tuple[int, ...]]:
    """All runs of n tokens."""
    return [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
