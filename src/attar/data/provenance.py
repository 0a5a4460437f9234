"""Who wrote a text: the terms of the teachers whose answers a JSONL file holds, as a signal of the lineage.

``attar collect`` writes ``NAME.jsonl.card.json`` next to its file, a card whose parent is the teacher. Rows
that were added afterwards have an unknown author. Where there is no such card, the rows say the teacher's
name in ``teacher``; a name alone can add a licence with limits, but the provenance stays unknown. Text that a
model is taught as a teacher's answers without either has an unknown author.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from attar.checkpoint.card import Card, Parent
from attar.checkpoint.hashing import sha256_file, sha256_text
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.licences import UNKNOWN, identify_service
from attar.data.python_text import CHAT, PROSE
from attar.data.sources import UNSPLIT, path_of, sources

CARD = ".card.json"
PYTHON_SOURCES = (PROSE, CHAT, "python-stdlib")
"""Text by people, which attar reads of Python itself."""


def provenance(data: str, *, signal: bool) -> tuple[Parent, ...]:
    """The lineage of a source of text: a record for each JSONL file with a card or with teachers' names.

    Args:
        data: a source as in :mod:`attar.data.sources`.
        signal: whether the text is taught as a teacher's answers, so that an unknown author counts.

    Raises:
        CheckpointError: a card is damaged.
        DataError: a file cannot be read.
    """
    if len(names := sources(data)) > 1:
        return tuple(record for name in names for record in provenance(name, signal=signal))
    name = data.removeprefix(UNSPLIT)
    if name in PYTHON_SOURCES:
        return ()
    path = path_of(data)
    files = [path] if path.is_file() else sorted(path.rglob("*.jsonl")) if path.is_dir() else []
    records = tuple(record for file in files for record in _of_file(file))
    if signal and not records:
        return (_unknown(name, sha256_file(path) if path.is_file() else sha256_text(name)),)
    return records


def card_path(data: Path) -> Path:
    """The card of a file of collected text."""
    return data.with_name(data.name + CARD)


def read_card(data: Path) -> Card | None:
    """The card of a file of collected text; None where there is none.

    Raises:
        CheckpointError: it is damaged.
    """
    path = card_path(data)
    return Card.from_dict(read_json(path), path) if path.is_file() else None


def _of_file(file: Path) -> Iterator[Parent]:
    if card := read_card(file):
        digest = sha256_file(file)
        yield replace(card.as_parent("signal", digest), name=file.name)
        if card.files.get(file.name, digest) != digest:
            yield _record(file.name, digest, [UNKNOWN], ["changed since its card was written"])
    elif teachers := _teachers(file):
        services = [identify_service("", teacher) for teacher in teachers]
        ids = list(dict.fromkeys([UNKNOWN, *(name for service in services for name in service["ids"])]))
        evidence = [f"{file.name}: teacher {teacher}" for teacher in teachers]
        yield _record(file.name, sha256_file(file), ids, evidence)


def _teachers(file: Path) -> list[str]:
    """The names in the rows' ``teacher``, each once; none of a file that is not JSONL with objects."""
    if file.suffix != ".jsonl":
        return []
    names: dict[str, None] = {}
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if '"teacher"' in line:
                names |= dict.fromkeys(_teacher(line))
    return list(names)


def _teacher(line: str) -> list[str]:
    try:
        row: Any = json.loads(line)
    except ValueError:
        return []
    name = row.get("teacher") if isinstance(row, dict) else None
    return [name] if isinstance(name, str) and name else []


def _unknown(name: str, fingerprint: str) -> Parent:
    return _record(name, fingerprint, [UNKNOWN], ["nothing says who wrote it"])


def _record(name: str, fingerprint: str, ids: list[str], evidence: list[str]) -> Parent:
    licence = {"ids": ids, "evidence": evidence}
    return Parent(role="signal", name=name, stage="collect", fingerprint=fingerprint, licence=licence)
