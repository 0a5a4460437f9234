"""Which documents of a source are trained on, calibrated on, evaluated on: no passage is in two of them.

    100 documents and more    each by a hash of its content: the same document is in the same split in every
                              source, however often it occurs
    fewer                     by position: the first 80 % of the characters train, the next 10 % calibrate,
                              the last 10 % evaluate. A cut moves to the end of a document, paragraph or line
                              near it; conversations are never cut. What occurs twice counts once, so that no
                              document and no long paragraph is on both sides
    under 1,000 characters    cannot be cut: every split is the whole, and says so

Stretches are contiguous: interleaved ones would have a neighbour of each evaluated passage, on the same
topic, in the training text.
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

BY_HASH = 100  # documents from which on a hash splits well enough
SPLITS = {"train": range(90), "calibration": range(90, 95), "evaluation": range(95, 100)}
"""Which per cent of the hash belongs to which split."""

SHARES = {"train": 0.8, "calibration": 0.1, "evaluation": 0.1}
LEAST = 1_000  # characters of a source that can be cut
NEAR = 0.02  # of a source: how far a cut moves to fall between two documents
PARAGRAPH = 2_000  # characters: as far a cut moves to fall between two paragraphs, or NEAR
LONG = 200  # characters of a paragraph that may stand in one split only
_BREAKS = ("\n\n", "\n", " ")


@dataclass(frozen=True)
class Split:
    """The documents of one split.

    Attributes:
        documents: in the source's order.
        shared: why the other splits hold the same text; empty where they do not.
    """

    documents: list[Document]
    shared: str = ""


def take(documents: Sequence[Document], split: str) -> Split:
    """The documents of a split: by content where there are many, by position where there are few."""
    if len(documents) >= BY_HASH:
        return Split([each for each in documents if split_of(content(each)) == split])
    unique = list({content(each): each for each in documents}.values())
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
    """Contiguous stretches of a list of documents, in the order of ``shares``.

    Args:
        documents: no two alike.
        shares: name to fraction of all characters.
    """
    rest, parts, seen = list(documents), {}, set[str]()
    total = sum(map(size, documents))
    for name, share in shares.items():
        last = name == list(shares)[-1]
        part, rest = (rest, []) if last else _cut(rest, share * total, NEAR * total)
        parts[name] = [each for each in (_new(document, seen) for document in part) if each]
        seen.update(_paragraphs(parts[name]))
    return parts


def _cut(documents: list[Document], wanted: float, near: float) -> tuple[list[Document], list[Document]]:
    """The first documents, ``wanted`` characters in all, and the rest; the one at the cut may be divided."""
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
    """The end of a paragraph, else of a line, else of a word, at most ``near`` characters before a
    position."""
    for mark in _BREAKS:
        index = text.rfind(mark, max(position - near, 0), position)
        if index > 0:
            return index + len(mark)
    return position


def _new(document: Document, seen: set[str]) -> Document:
    """A document without the long paragraphs that stand in an earlier split."""
    if not isinstance(document, str) or not any(each in seen for each in _paragraphs([document])):
        return document
    return "\n\n".join(part for part in document.split("\n\n") if " ".join(part.split()) not in seen)


def _paragraphs(documents: Iterable[Document]) -> list[str]:
    """The long paragraphs of the texts, spaces made even."""
    texts = (document for document in documents if isinstance(document, str))
    parts = (" ".join(part.split()) for text in texts for part in text.split("\n\n"))
    return [part for part in parts if len(part) >= LONG]


def content(document: Document) -> str:
    """A document as one text."""
    return document if isinstance(document, str) else json.dumps(document, sort_keys=True)


def size(document: Document) -> int:
    """Characters of a document."""
    return len(content(document))
