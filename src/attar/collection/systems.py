"""System prompts that ask for reasoning, mixed by weights.

Orca (Mukherjee et al. 2023, arXiv 2306.02707): a student that learns from bare answers copies a teacher's
style and not its reasoning. Under system prompts that ask for steps, reasons and checks the same teacher
writes down how it comes to an answer, and a mixture of them, the empty one included, teaches the student to
answer in each of these ways.

Differs from the paper: its 16 prompts belong to sub-collections of FLAN; these are attar's own words, and
every prompt draws from one mixture. What a prompt draws depends on the seed and its own text alone, so
further prompts change none of the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from attar.checkpoint.hashing import canonical_json, sha256_text
from attar.collection.prompts import ChatPrompt
from attar.data.sources import json_rows
from attar.errors import DataError, SettingsError

ROW = 'a row is {"system": "...", "weight": 2}'
SYSTEMS = {
    "none": "",
    "answer": "Answer fully and precisely. Leave nothing out that the question needs.",
    "steps": "Work the problem out step by step before you give the answer. State the answer last, on a line "
    "of its own.",
    "reasons": "Give your answer, then justify it: which facts and rules lead to it, and why the obvious "
    "alternatives are wrong.",
    "check": "Solve the task, then check your result by another way or against the conditions of the task, "
    "and correct it where the check fails.",
    "learner": "You teach someone who meets this subject for the first time. Explain every step in plain "
    "words, with an example.",
    "compare": "Consider at least two ways to go about the task, say what speaks for each, then follow the "
    "better one to the end.",
}


def read_mixture(settings: Sequence[str]) -> dict[str, float]:
    """System prompts and their weights from ``NAME=WEIGHT`` (or ``NAME``, which weighs 1) and ``FILE.jsonl``.

    Raises:
        SettingsError: an unknown name, or a weight that is no positive number.
        DataError: a file that is missing or wrong.
    """
    weights: dict[str, float] = {}
    for text in settings:
        rows = _of_file(Path(text)) if text.endswith(".jsonl") else [_named(text)]
        for system, weight in rows:
            weights[system] = weights.get(system, 0.0) + weight
    return weights


def with_system(prompt: ChatPrompt, weights: Mapping[str, float], seed: int) -> ChatPrompt:
    """The prompt under a system prompt drawn from the mixture; one that has its own keeps it."""
    if not weights or prompt.messages[0]["role"] in ("system", "developer"):
        return prompt
    digest = sha256_text(f"{seed}:{canonical_json(list(prompt.messages))}")
    point = int(digest[:13], 16) / 16**13 * sum(weights.values())
    system = list(weights)[-1]
    for candidate, weight in weights.items():
        point -= weight
        if point < 0:
            system = candidate
            break
    messages = ({"role": "system", "content": system}, *prompt.messages) if system else prompt.messages
    return ChatPrompt(messages, prompt.where)


def _named(text: str) -> tuple[str, float]:
    name, _, weight = text.partition("=")
    if name not in SYSTEMS or not _is_weight(weight or "1"):
        allowed = f"NAME=WEIGHT, a name of {', '.join(SYSTEMS)}, or a file that ends with .jsonl"
        raise SettingsError("systems", text, allowed)
    return SYSTEMS[name], float(weight or 1)


def _of_file(file: Path) -> list[tuple[str, float]]:
    rows = []
    for where, row in json_rows(file):
        system, weight = (row.get("system"), row.get("weight", 1)) if isinstance(row, dict) else (None, 0)
        if not isinstance(system, str) or isinstance(weight, bool) or not _is_weight(weight):
            raise DataError(f"{where}: not a system prompt with a positive weight", hint=ROW)
        rows.append((system, float(weight)))
    if not rows:
        raise DataError(f"{file}: no system prompt in it", hint=ROW)
    return rows


def _is_weight(value: object) -> bool:
    try:
        return 0 < float(value) < math.inf  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
