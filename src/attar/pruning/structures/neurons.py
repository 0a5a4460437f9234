"""Neurons of the MLP."""

from __future__ import annotations

from collections.abc import Sequence

from attar.models.anatomy.parts import Anatomy
from attar.models.anatomy.unit_weights import neuron_weights
from attar.models.surgery.cut_plan import CutPlan
from attar.pruning.criteria import UNIT_CRITERIA
from attar.pruning.structures.sizes import snapped
from attar.pruning.structures.structure import Structure


def neuron_plan(anatomy: Anatomy, keep: Sequence[Sequence[int]]) -> CutPlan:
    """The cut that leaves these neurons of each layer."""
    return CutPlan(neurons=tuple(tuple(kept) for kept in keep))


NEURONS = Structure(
    noun="neurons",
    owner="each layer",
    criteria=UNIT_CRITERIA,
    weights=neuron_weights,
    total=lambda anatomy: anatomy.blocks[0].mlp.neurons,
    count=lambda total, options: snapped(total, options, "neurons of a layer"),
    plan=neuron_plan,
    parts=lambda anatomy: [block.mlp.name for block in anatomy.blocks],
    uneven=True,
)
