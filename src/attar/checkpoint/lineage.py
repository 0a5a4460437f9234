"""Lineage: the record that a child keeps of its parent, and the parents of an opened checkpoint."""

from __future__ import annotations

from dataclasses import replace

from attar.checkpoint.card import ROLES, Card, Parent
from attar.checkpoint.identify import identify
from attar.checkpoint.licences import Duties, duties
from attar.checkpoint.open import Checkpoint


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
