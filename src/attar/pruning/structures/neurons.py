"""Neurons of the MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attar.errors import SettingsError
from attar.models.parts import Anatomy
from attar.models.surgery import keep_neurons
from attar.pruning.settings import NeuronSettings
from attar.pruning.structures.structure import Structure, UnitCut


def neuron_units(model: nn.Module, anatomy: Anatomy) -> tuple[list[nn.Module], list[Tensor]]:
    """Per layer, the down projection; each of its inputs is a neuron."""
    modules = [model.get_submodule(block.mlp.down.name) for block in anatomy.blocks]
    return modules, [torch.arange(block.mlp.neurons) for block in anatomy.blocks]


def neuron_count(total: int, settings: NeuronSettings) -> int:
    """Neurons that stay: about the fraction asked for, as a multiple that quantization groups can use.

    Raises:
        SettingsError: the multiple is larger than the layer.
    """
    wanted = total * (1.0 - settings.ratio)
    if settings.multiple_of > total:
        raise SettingsError("multiple_of", settings.multiple_of, f"at most the {total} neurons of a layer")
    if settings.multiple_of:
        return _nearest(total, wanted, settings.multiple_of)
    return next(
        _nearest(total, wanted, m)
        for m in (64, 32, 16, 8, 4, 2, 1)
        if m == 1 or (total % m == 0 and wanted >= 8 * m and _hits(total, wanted, m))
    )


def _nearest(total: int, wanted: float, multiple: int) -> int:
    """The multiple nearest to the number wanted; at least one, at most all."""
    return min(max(round(wanted / multiple), 1) * multiple, total)


def _hits(total: int, wanted: float, multiple: int) -> bool:
    """Whether the multiple is off by at most a quarter of what is to be removed."""
    return abs(_nearest(total, wanted, multiple) - wanted) <= 0.25 * (total - wanted)


def neuron_cut(config: dict[str, Any], anatomy: Anatomy, count: int, settings: NeuronSettings) -> UnitCut:
    """Neurons are always removed: every family's config has their number."""
    return keep_neurons


NEURONS = Structure("neurons", neuron_units, neuron_count, neuron_cut, lambda block: block.mlp.name)
