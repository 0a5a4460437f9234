"""Rows that share a run of words with an evaluation: Brown et al. 2020, "Language Models are Few-Shot
Learners", arXiv 2005.14165, appendix C, which took runs of 13 words.

An item of an evaluation is a line of a text file, or all texts of a JSONL row together. A row goes if any run
of n words of its messages is in an item; an item of fewer than n words counts as one run of its own length,
if it has at least :data:`LEAST` words. A run that :data:`COMMON` items or more share is a form of words
("Answer the following question ..."), which proves nothing.

Differs from GPT-3: there whole documents were split around a collision; here the row goes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attar.collection.filters.row import CollectedRow, content_of
from attar.collection.filters.settings import FilterSettings
from attar.data.words import Hashes, run_hashes, words
from attar.errors import DataError

LEAST = 6  # words of the shortest item that is looked for
COMMON = 10  # items from which on a shared run is a form of words


def contamination(rows: Sequence[CollectedRow], settings: FilterSettings) -> list[str]:
    """Reasons against rows; "" keeps one.

    Raises:
        DataError: a file of the evaluation cannot be read, or has no item that is long enough.
    """
    known = {
        file: item_hashes(list(read_items(Path(file))), settings.evaluation_run, file)
        for file in settings.evaluation
    }
    return [
        next(
            (
                f"shares a run of words with {Path(file).name}"
                for file, table in known.items()
                if overlaps(words(_text(row)), table)
            ),
            "",
        )
        for row in rows
    ]


def item_hashes(items: Sequence[str], run: int, file: str = "the evaluation") -> dict[int, Hashes]:
    """Length of a run in words, to the hashes of the evaluation's runs of that length."""
    counts: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for item in items:
        sequence = words(item)
        if len(sequence) >= min(LEAST, run):
            length = min(run, len(sequence))
            for value in np.unique(run_hashes(sequence, length)).tolist():
                counts[length][value] += 1
    if not counts:
        raise DataError(f"evaluation: {file}: no item of {min(LEAST, run)} words or more")
    return {
        length: np.array(sorted(value for value, count in table.items() if count < COMMON), np.uint64)
        for length, table in counts.items()
    }


def overlaps(sequence: Sequence[str], table: dict[int, Hashes]) -> bool:
    """Whether a text's words have a run in common with the evaluation's of :func:`item_hashes`."""
    return any(
        len(sequence) >= length and bool(np.isin(run_hashes(sequence, length), hashes).any())
        for length, hashes in table.items()
    )


def read_items(file: Path) -> Iterator[str]:
    """The items of an evaluation's file.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
        for line in lines:
            yield "\n".join(_texts(json.loads(line))) if file.suffix == ".jsonl" and line.strip() else line
    except (OSError, ValueError) as error:
        raise DataError(f"evaluation: {file}: cannot be read: {error}") from error


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _text(row: CollectedRow) -> str:
    """All text of a row but a system prompt."""
    if "messages" in row:
        return "\n".join(content_of(item) for item in row["messages"] if item.get("role") != "system")
    return "\n".join(str(row.get(name, "")) for name in ("prompt", "completion", "text"))
