"""Neurons of the MLP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from attar.models.cut_plan import CutPlan
from attar.models.parts import Anatomy, weight_of
from attar.pruning.criteria import UNIT_CRITERIA
from attar.pruning.scoring import UnitWeights
from attar.pruning.structures.sizes import snapped
from attar.pruning.structures.structure import Structure, owners_of


def neuron_weights(model: nn.Module, anatomy: Anatomy) -> list[UnitWeights]:
    """Of each neuron its rows of up and gate and its column of down."""
    layers = []
    for mlp in (block.mlp for block in anatomy.blocks):
        producers = []
        for part in (mlp.up, mlp.gate):
            if part is not None:
                module = model.get_submodule(part.name)
                rows = [[row] for row in part.stored_rows()]
                producers.append((module, owners_of(rows, weight_of(module).shape[0])))
        consumer = model.get_submodule(mlp.down.name)
        layers.append(UnitWeights(consumer, torch.arange(mlp.neurons), tuple(producers)))
    return layers


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
