"""Lineage: the record that a child keeps of its parent, and the parents of an opened checkpoint."""

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
"""Beside the card: what text every stage of the lineage read, as records of :mod:`attar.data.seen`."""


def texts_of(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """The records of the text that a checkpoint and its ancestors have read; none where attar did not make
    it.

    Raises:
        CheckpointError: the file is damaged.
    """
    source = checkpoint.source
    places = [texts_beside(source), source.parent / TEXTS] if source.is_file() else [source / TEXTS]
    for path in places:
        if checkpoint.card is not None and path.is_file():
            records = read_json(path).get("texts")
            return [each for each in records if isinstance(each, dict)] if isinstance(records, list) else []
    return []


def texts_beside(file: Path) -> Path:
    """Where the records of a model in a single file stand: ``NAME.attar-text.json``."""
    return file.with_suffix(f".{TEXTS}")


def write_texts(folder: Path, parents: Iterable[Checkpoint], own: list[dict[str, Any]]) -> None:
    """Write the parents' records and those of a new stage, each once; nothing where there are none."""
    records: list[dict[str, Any]] = []
    for each in (record for texts in (*map(texts_of, parents), own) for record in texts):
        if each not in records:
            records.append(each)
    if records:
        write_json(folder / TEXTS, {"attar": 1, "texts": records})


def as_parent(checkpoint: Checkpoint, role: str, fingerprint: str = "") -> Parent:
    """The record that a child keeps of a checkpoint.

    Args:
        checkpoint: the parent.
        role: ``weights`` or ``signal``.
        fingerprint: its fingerprint, where known.
    """
    assert role in ROLES, f"role is {role!r}"
    card = checkpoint.card or Card(name=checkpoint.name, stage="original")
    parent = replace(card.as_parent(role, fingerprint), name=checkpoint.name)
    return parent if parent.parents else replace(parent, licence=identify(checkpoint))


def lineage_of(checkpoint: Checkpoint) -> tuple[Parent, ...]:
    """What a checkpoint's duties follow from: its parents, or itself where it has none."""
    if checkpoint.card is not None and checkpoint.card.parents:
        return checkpoint.card.parents
    return (as_parent(checkpoint, "weights"),)


def duties_of(checkpoint: Checkpoint) -> Duties:
    """The duties of an opened checkpoint, computed afresh with this version's data."""
    return duties(lineage_of(checkpoint))


def compact(lineage: Sequence[Parent]) -> tuple[Parent, ...]:
    """The same lineage, with each teacher that is told elsewhere in it told once.

    A pruned model recovers by learning from the unpruned one, which is also its ancestor. Without this, every
    such round would double the card. A repeated teacher keeps its name, stage and fingerprint, and in place
    of its ancestors the licences of their roots: seen through a teacher they are all signal, so no duty
    changes.
    """
    told = {parent.fingerprint for parent in _along_weights(lineage) if parent.fingerprint}
    return tuple(_without_repeats(parent, told) for parent in lineage)


def _along_weights(lineage: Sequence[Parent]) -> Iterator[Parent]:
    for parent in lineage:
        if parent.role == "weights":
            yield parent
            yield from _along_weights(parent.parents)


def _without_repeats(parent: Parent, told: set[str]) -> Parent:
    if parent.role == "signal" and parent.parents and parent.fingerprint in told:
        ids = dict.fromkeys(known for root in _leaves(parent) for known in licence_ids(root))
        return replace(parent, parents=(), licence={"ids": list(ids), "evidence": ["told above"]})
    return replace(parent, parents=tuple(_without_repeats(item, told) for item in parent.parents))


def _leaves(parent: Parent) -> Iterator[Parent]:
    if not parent.parents:
        yield parent
    for item in parent.parents:
        yield from _leaves(item)
