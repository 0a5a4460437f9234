"""Channels of the residual stream: of embeddings, norms and head, and of all that reads or writes it."""

from __future__ import annotations

from attar.models.surgery.cut_plan import CutPlan
from attar.pruning.criteria import HIDDEN_CRITERIA
from attar.pruning.structures.sizes import snapped
from attar.pruning.structures.structure import Structure, no_weights

HIDDEN = Structure(
    noun="channels",
    owner="the residual stream",
    criteria=HIDDEN_CRITERIA,
    weights=no_weights,
    total=lambda anatomy: anatomy.hidden_size,
    count=lambda total, options: snapped(total, options, "channels"),
    plan=lambda anatomy, keep: CutPlan(hidden=tuple(keep[0])),
    parts=lambda anatomy: ["residual stream"],
)
