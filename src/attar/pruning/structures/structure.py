"""The interface of a structure that can be pruned.

A unit is the smallest removable piece: a KV head with its query heads, a neuron, a channel, a layer. Units
that are compared with each other form a row of the scores: the heads of a layer, the channels of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from attar.importance import UnitCriterion
from attar.models.anatomy.parts import Anatomy
from attar.models.anatomy.unit_weights import UnitWeights
from attar.models.surgery.cut_plan import CutPlan


@dataclass(frozen=True)
class Structure:
    """One kind of units.

    Attributes:
        noun: what a message calls the units; ``owner`` what has a row of them.
        criteria: the criteria that score them, by name.
        weights: per layer, the weights of its units; empty where a criterion needs none.
        total: units of a row.
        count: ``count(total, options)``: how many of them stay.
        plan: ``plan(anatomy, keep)``: the cut that leaves the units ``keep`` of each row.
        parts: names of the modules whose units the rows are, for the report.
        uneven: rows may keep different numbers, where the config can say it.
    """

    noun: str
    owner: str
    criteria: Mapping[str, UnitCriterion]
    weights: Callable[[nn.Module, Anatomy], list[UnitWeights]]
    total: Callable[[Anatomy], int]
    count: Callable[[int, Any], int]
    plan: Callable[[Anatomy, Sequence[Sequence[int]]], CutPlan]
    parts: Callable[[Anatomy], list[str]]
    uneven: bool = False


def nearest(total: int, options: Any) -> int:
    """Units that stay: the nearest number, at least one."""
    return max(round(total * (1.0 - float(options.ratio))), 1)


def no_weights(model: nn.Module, anatomy: Anatomy) -> list[UnitWeights]:
    """For structures whose criteria look at hidden states."""
    return []
