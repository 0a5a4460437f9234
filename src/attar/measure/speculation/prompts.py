"""Prompts to measure speculation on, made from the running Python and from a seed: no download.

    code         source of the standard library (the split that attar:tiny never saw), cut at a line
    prose        the longest docstrings of some of its files, cut at a word
    json         records of one schema with random values, cut inside a record
    repetition   a passage of code twice, and its first third again
    random       printable bytes without a pattern, where drafts must fail

The same Python version gives the same prompts. Spec-Bench's files are read too (Xia et al., 2024): a JSON
object a line with ``question_id``, ``category`` and ``turns``; categories are the sets, and first turns the
prompts, as later turns need the model's answers.
"""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from attar.data.python_text import texts
from attar.data.sources import json_rows
from attar.errors import DataError, SettingsError

LENGTH = 600  # characters of a prompt, about
WORDS = ("alpha", "bravo", "delta", "hotel", "kilo", "lima", "oscar", "romeo", "sierra", "tango")


@dataclass(frozen=True)
class SpecBenchQuestion:
    """A line of Spec-Bench's format.

    Args:
        turns: what a person says, turn by turn; at least one.
    """

    id: int | str
    category: str
    turns: tuple[str, ...]


def prompt_sets(names: tuple[str, ...], count: int, seed: int = 0) -> dict[str, list[str]]:
    """Texts to continue, ``count`` for each named set (fewer where the library has no more).

    Raises:
        SettingsError: an unknown set.
    """
    for name in names:
        if name not in SETS:
            raise SettingsError("sets", name, ", ".join(SETS))
    return {name: SETS[name](count, random.Random(f"{name} {seed}")) for name in names}


def read_questions(path: str | Path) -> list[SpecBenchQuestion]:
    """Spec-Bench's ``question.jsonl``.

    Raises:
        DataError: the file cannot be read, or a line is not a question; names the line.
    """
    prompts = [_question(location, fields) for location, fields in json_rows(Path(path))]
    if not prompts:
        raise DataError(
            f"{path} has no questions", hint="one JSON object a line: question_id, category, turns"
        )
    return prompts


def question_sets(questions: list[SpecBenchQuestion], count: int) -> dict[str, list[str]]:
    """First turns by category, in the file's order, ``count`` of each at most."""
    prompts: dict[str, list[str]] = {}
    for question in questions:
        turns = prompts.setdefault(question.category, [])
        if len(turns) < count:
            turns.append(question.turns[0])
    return prompts


def _question(location: str, fields: Any) -> SpecBenchQuestion:
    if not isinstance(fields, dict):
        raise DataError(f"{location}: not a JSON object")
    turns, category = fields.get("turns"), fields.get("category")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise DataError(f"{location}: turns must be a list of texts, at least one")
    if not isinstance(category, str):
        raise DataError(f"{location}: category must be a text")
    name = fields.get("question_id")
    if isinstance(name, bool) or not isinstance(name, int | str):
        raise DataError(f"{location}: question_id must be a number or a name")
    return SpecBenchQuestion(name, category, tuple(turns))


def _code(count: int, draws: random.Random) -> list[str]:
    return [_cut(text, "\n") for text in _chosen(_sources(), count, draws)]


def _prose(count: int, draws: random.Random) -> list[str]:
    prompts: list[str] = []
    for source in draws.sample(sources := _sources(), len(sources)):
        longest = max(_docstrings(source), key=len, default="")
        if len(prompts) == count:
            break
        if len(longest) > LENGTH:
            prompts.append(_cut(longest, " "))
    return prompts


def _json(count: int, draws: random.Random) -> list[str]:
    return [_records(draws) for _ in range(count)]


def _repetition(count: int, draws: random.Random) -> list[str]:
    prompts = []
    for text in _chosen(_sources(), count, draws):
        passage = _cut(text[-2 * LENGTH :], "\n", LENGTH // 2)
        prompts.append(2 * passage + passage[: len(passage) // 3])
    return prompts


def _random(count: int, draws: random.Random) -> list[str]:
    return ["".join(chr(draws.randrange(32, 127)) for _ in range(LENGTH // 2)) for _ in range(count)]


@cache
def _sources() -> list[str]:
    """Files of the library that are long enough."""
    return [text for _, text in texts("evaluation") if len(text) > 4 * LENGTH]


def _docstrings(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text


def _chosen(texts: list[str], count: int, draws: random.Random) -> list[str]:
    return draws.sample(texts, min(count, len(texts)))


def _cut(text: str, mark: str, length: int = LENGTH) -> str:
    """The beginning of a text, up to the last mark in it."""
    end = text.rfind(mark, 1, length)
    return text[: end + 1 if end > 0 else length]


def _records(draws: random.Random) -> str:
    """The beginning of an array of records, cut after a key."""
    records = []
    for number in range(40):
        record = {
            "id": 1000 + number,
            "name": draws.choice(WORDS),
            "tags": draws.sample(WORDS, 2),
            "size": {"width": draws.randrange(10, 99), "height": draws.randrange(10, 99)},
            "active": draws.random() < 0.5,
        }
        records.append(record)
    return _cut(json.dumps(records, indent=2), ":")


SETS: dict[str, Callable[[int, random.Random], list[str]]] = {
    "code": _code,
    "prose": _prose,
    "json": _json,
    "repetition": _repetition,
    "random": _random,
}
