"""Whole layers."""

from __future__ import annotations

from attar.models.cut_plan import CutPlan
from attar.pruning.structures.structure import Structure, nearest, no_weights
from attar.walks.importance import LAYER_CRITERIA

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
