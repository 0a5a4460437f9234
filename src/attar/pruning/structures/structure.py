"""The interface of a structure that can be pruned.

A unit is the smallest removable piece (a KV head with its query heads, a neuron). Its output is one or more
input columns of the Linear that follows: that is where a mask multiplies, and where a criterion looks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attar.models.parts import Anatomy, Block

UnitCut = Callable[[Any, Sequence[Sequence[int]]], Any]


@dataclass(frozen=True)
class Structure:
    """One kind of units.

    Attributes:
        noun: what a message calls the units.
        units: per layer, the Linear that follows the units, and the unit of each of its inputs (int64 (F,)).
        count: how many of ``total`` units a layer keeps under the settings.
        cut: ``cut(config, anatomy, count, settings)``: the function that removes units, given a model and the
            kept units of each layer. Raises where the family's config cannot express the result.
        part: name of the module whose units these are, for the report.
    """

    noun: str
    units: Callable[[nn.Module, Anatomy], tuple[list[nn.Module], list[Tensor]]]
    count: Callable[[int, Any], int]
    cut: Callable[[dict[str, Any], Anatomy, int, Any], UnitCut]
    part: Callable[[Block], str]


def units_of(columns: Sequence[Sequence[int]], features: int) -> Tensor:
    """The unit of each input column, int64 (F,), from the columns of each unit."""
    owner = torch.full((features,), -1, dtype=torch.int64)
    for unit, inside in enumerate(columns):
        owner[torch.as_tensor(inside)] = unit
    assert (owner >= 0).all(), "every column belongs to a unit"
    return owner
