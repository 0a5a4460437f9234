"""Lineage: a child's record of its parents, and the text that a checkpoint and its ancestors read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attar.checkpoint.atomic import write_json
from attar.checkpoint.card import ROLES, Card, Parent
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.licences import Duties, duties, identify, licence_ids
from attar.checkpoint.open import Checkpoint

TEXTS = "attar-text.json"
"""Next to the card: the text that each stage of the lineage read, as records of :mod:`attar.data.seen`."""


def texts_of(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """The records of the text that a checkpoint and its ancestors read; none for a model without a card.

    Raises:
        CheckpointError: the file is damaged.
    """
    source = checkpoint.source
    paths = [texts_file(source), source.parent / TEXTS] if source.is_file() else [source / TEXTS]
    for path in paths:
        if checkpoint.card is not None and path.is_file():
            records = read_json(path).get("texts")
            return [item for item in records if isinstance(item, dict)] if isinstance(records, list) else []
    return []


def texts_file(file: Path) -> Path:
    """The file with the records of a single-file model: ``NAME.attar-text.json``."""
    return file.with_suffix(f".{TEXTS}")


def write_texts(folder: Path, parents: Iterable[Checkpoint], new: list[dict[str, Any]]) -> None:
    """Write the records of the parents and of the new stage without duplicates; no file without records."""
    records: list[dict[str, Any]] = []
    for record in (record for texts in (*map(texts_of, parents), new) for record in texts):
        if record not in records:
            records.append(record)
    if records:
        write_json(folder / TEXTS, {"attar": 1, "texts": records})


def as_parent(checkpoint: Checkpoint, role: str, fingerprint: str = "") -> Parent:
    """The record that a child keeps of a checkpoint with a role, ``weights`` or ``signal``."""
    assert role in ROLES, f"role is {role!r}"
    card = checkpoint.card or Card(name=checkpoint.name, stage="original")
    parent = replace(card.as_parent(role, fingerprint), name=checkpoint.name)
    return parent if parent.parents else replace(parent, licence=identify(checkpoint))


def duties_of(checkpoint: Checkpoint) -> Duties:
    """The duties that follow from a checkpoint's parents, or from itself without parents."""
    if checkpoint.card is not None and checkpoint.card.parents:
        return duties(checkpoint.card.parents, checkpoint.card.settings)
    return duties((as_parent(checkpoint, "weights"),))


def compact(lineage: Sequence[Parent]) -> tuple[Parent, ...]:
    """The same lineage, without the ancestors of a teacher that is also an ancestor by weights.

    A pruned model learns from the unpruned one, which is its ancestor too: each such round would double the
    card. A repeated teacher keeps its name, stage and fingerprint, and the licences of its roots instead of
    its ancestors. All roots of a teacher count as signal, so no duty changes.
    """
    known = {parent.fingerprint for parent in _along_weights(lineage) if parent.fingerprint}
    return tuple(_without_repeats(parent, known) for parent in lineage)


def _along_weights(lineage: Sequence[Parent]) -> Iterator[Parent]:
    for parent in lineage:
        if parent.role == "weights":
            yield parent
            yield from _along_weights(parent.parents)


def _without_repeats(parent: Parent, known: set[str]) -> Parent:
    if parent.role == "signal" and parent.parents and parent.fingerprint in known:
        return replace(
            parent, parents=(), licence={"ids": root_licences(parent), "evidence": ["listed above"]}
        )
    return replace(parent, parents=tuple(_without_repeats(item, known) for item in parent.parents))


def root_licences(parent: Parent) -> list[str]:
    """The licence ids of a record's roots, each once: those of a signal, on whatever way it came."""
    return list(dict.fromkeys(name for root in _leaves(parent) for name in licence_ids(root)))


def _leaves(parent: Parent) -> Iterator[Parent]:
    if not parent.parents:
        yield parent
    for item in parent.parents:
        yield from _leaves(item)
