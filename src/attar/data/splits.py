"""Splits of a source for training, calibration and evaluation: no passage is in two of them.

    100 documents and more    by a hash of each document's content: a document is in the same split of every
                              source
    fewer                     by position: the first 80 % of the characters train, the next 10 % calibrate,
                              the last 10 % evaluate. A cut moves to the nearest end of a document, paragraph
                              or line; conversations are not cut. Repeated documents and long paragraphs count
                              once, so that none is in two splits
    under 1,000 characters    not split: each split is the whole source, marked as shared

Splits by position are contiguous: of interleaved passages, the neighbours of an evaluated one, on the same
topic, would be in the training text.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Document = str | list[dict[str, Any]]
"""A text, or the messages of a conversation."""

BY_HASH = 100  # fewest documents that a hash splits evenly enough
SPLITS = {"train": range(90), "calibration": range(90, 95), "evaluation": range(95, 100)}
"""Which per cent of the hash belongs to which split."""

SHARES = {"train": 0.8, "calibration": 0.1, "evaluation": 0.1}
LEAST = 1_000  # fewest characters of a source that is split
NEAR = 0.02  # of a source: the largest shift of a cut to the end of a document
PARAGRAPH = 2_000  # characters: the largest shift of a cut to the end of a paragraph, if more than NEAR
LONG = 200  # characters from which on a paragraph may be in one split only
_BREAKS = ("\n\n", "\n", " ")


@dataclass(frozen=True)
class Split:
    """The documents of one split.

    Attributes:
        documents: in the source's order.
        shared: the reason why other splits hold the same text; empty if they do not.
    """

    documents: list[Document]
    shared: str = ""


def take(documents: Sequence[Document], split: str) -> Split:
    """The documents of a split: by content of many documents, by position of few."""
    if len(documents) >= BY_HASH:
        return Split([document for document in documents if split_of(content(document)) == split])
    unique = list({content(document): document for document in documents}.values())
    total = sum(map(size, unique))
    if total < LEAST:
        return Split(unique, f"{total:,} characters cannot be cut into splits")
    parts = by_position(unique, SHARES)
    return Split(parts[split])


def split_of(path: str) -> str:
    """The split of a file, from the first 32 bits of SHA-256 over its relative POSIX path, modulo 100."""
    bucket = int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") % 100
    return next(name for name, buckets in SPLITS.items() if bucket in buckets)


def by_position(documents: Sequence[Document], shares: dict[str, float]) -> dict[str, list[Document]]:
    """Contiguous parts of a list of distinct documents, by fractions of all characters in order."""
    remaining, parts, seen = list(documents), {}, set[str]()
    total = sum(map(size, documents))
    for name, share in shares.items():
        last = name == list(shares)[-1]
        part, remaining = (remaining, []) if last else _cut(remaining, share * total, NEAR * total)
        parts[name] = [kept for kept in (_new(document, seen) for document in part) if kept]
        seen.update(_paragraphs(parts[name]))
    return parts


def _cut(documents: list[Document], wanted: float, near: float) -> tuple[list[Document], list[Document]]:
    """The first documents, ``wanted`` characters in total, and the rest; one document may be split."""
    ends = [0]
    for document in documents:
        ends.append(ends[-1] + size(document))
    after = min(bisect_left(ends, wanted), len(documents))
    nearest = min((after - 1, after), key=lambda number: abs(ends[number] - wanted)) if after else 0
    document = documents[after - 1] if after else ""
    if abs(ends[nearest] - wanted) <= near or not isinstance(document, str):
        return documents[:nearest], documents[nearest:]
    near = max(near, min(5 * near, PARAGRAPH))
    position = _break(document, int(wanted - ends[after - 1]), int(near))
    return [*documents[: after - 1], document[:position]], [document[position:], *documents[after:]]


def _break(text: str, position: int, near: int) -> int:
    """The last end of a paragraph, else line, else word, at most ``near`` characters before a position."""
    for mark in _BREAKS:
        index = text.rfind(mark, max(position - near, 0), position)
        if index > 0:
            return index + len(mark)
    return position


def _new(document: Document, seen: set[str]) -> Document:
    """A document without the long paragraphs of earlier splits."""
    if not isinstance(document, str) or seen.isdisjoint(_paragraphs([document])):
        return document
    return "\n\n".join(part for part in document.split("\n\n") if " ".join(part.split()) not in seen)


def _paragraphs(documents: Iterable[Document]) -> list[str]:
    """The long paragraphs of the texts, with single spaces."""
    texts = (document for document in documents if isinstance(document, str))
    parts = (" ".join(part.split()) for text in texts for part in text.split("\n\n"))
    return [part for part in parts if len(part) >= LONG]


def content(document: Document) -> str:
    """A document as one text."""
    return document if isinstance(document, str) else json.dumps(document, sort_keys=True)


def size(document: Document) -> int:
    """Characters of a document."""
    return len(content(document))
