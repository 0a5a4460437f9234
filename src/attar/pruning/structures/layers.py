"""Whole layers."""

from __future__ import annotations

from attar.importance import LAYER_CRITERIA
from attar.models.surgery.cut_plan import CutPlan
from attar.pruning.structures.structure import Structure, nearest, no_weights

LAYERS = Structure(
    noun="layers",
    owner="the model",
    criteria=LAYER_CRITERIA,
    weights=no_weights,
    total=lambda anatomy: len(anatomy.blocks),
    count=nearest,
    plan=lambda anatomy, keep: CutPlan(layers=tuple(keep[0])),
    parts=lambda anatomy: [anatomy.blocks_name],
)
