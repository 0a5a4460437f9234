"""What can be removed from a model: heads, neurons, channels, layers, and the table of their names.

A unit is the smallest removable piece: a KV head with its query heads, a neuron, a channel, a layer. Units
that are compared with each other form a row of the scores: the heads of a layer, the channels of the model.
What a structure removes is a field of :class:`~attar.models.surgery.cut_plan.CutPlan`, which
:mod:`attar.models.surgery.cut_model` cuts and :mod:`attar.models.surgery.masking` masks.

heads         a KV head with all the query heads that read it
query-heads   query heads alone: Minitron (arXiv 2407.14679) ranks them within their group, removes the same
              number from each and leaves the KV heads; query and output projections get smaller, the KV cache
              does not
neurons       of the MLP
hidden        channels of the residual stream: of embeddings, norms and head, and of all that reads or writes
              the stream
layers        whole layers
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from attar.errors import SettingsError
from attar.importance import LAYER_CRITERIA, UnitCriterion
from attar.models.anatomy.parts import Anatomy, weight_of
from attar.models.anatomy.unit_weights import UnitWeights, group_weights, neuron_weights, query_weights
from attar.models.surgery.cut_plan import CutPlan, heads_of_groups
from attar.pruning.criteria import HIDDEN_CRITERIA, UNIT_CRITERIA


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


def snapped(total: int, options: Any, noun: str) -> int:
    """How many of ``total`` stay: about the fraction asked for, as a multiple that quantization groups can
    use.

    Raises:
        SettingsError: the multiple is larger than the total.
    """
    wanted = total * (1.0 - options.ratio)
    if options.multiple_of > total:
        raise SettingsError("multiple_of", options.multiple_of, f"at most the {total} {noun}")
    if options.multiple_of:
        return nearest_multiple(total, wanted, options.multiple_of)
    return next(
        nearest_multiple(total, wanted, m)
        for m in (64, 32, 16, 8, 4, 2, 1)
        if m == 1 or (total % m == 0 and wanted >= 8 * m and _hits(total, wanted, m))
    )


def nearest_multiple(total: int, wanted: float, multiple: int) -> int:
    """The multiple nearest to the number wanted; at least one, at most all."""
    return min(max(round(wanted / multiple), 1) * multiple, total)


def _hits(total: int, wanted: float, multiple: int) -> bool:
    """Whether the multiple is off by at most a quarter of what is to be removed."""
    return abs(nearest_multiple(total, wanted, multiple) - wanted) <= 0.25 * (total - wanted)


def group_plan(anatomy: Anatomy, keep: Sequence[Sequence[int]]) -> CutPlan:
    """The cut that leaves these KV groups of each layer."""
    pairs = zip(anatomy.blocks, keep, strict=True)
    return CutPlan(heads=tuple(heads_of_groups(block.attention, kept) for block, kept in pairs))


def query_plan(anatomy: Anatomy, keep: Sequence[Sequence[int]]) -> CutPlan:
    """The cut that leaves these query heads of each KV head of each layer."""
    rows, heads = iter(keep), []
    for attention in (block.attention for block in anatomy.blocks):
        size = attention.heads // attention.kv_heads
        heads.append(tuple(group * size + head for group in range(attention.kv_heads) for head in next(rows)))
    return CutPlan(heads=tuple(heads))


def zero_heads(model: nn.Module, anatomy: Anatomy, plan: CutPlan) -> nn.Module:
    """Zero the output projection's columns of the removed heads, in place. Nothing gets smaller."""
    assert plan.heads is not None
    with torch.no_grad():
        for block, kept in zip(anatomy.blocks, plan.heads, strict=True):
            weight = weight_of(model.get_submodule(block.attention.o.name))
            for head in range(block.attention.heads):
                if head not in kept:
                    weight[:, list(block.attention.query_columns(head))] = 0.0
    return model


STRUCTURES: dict[str, Structure] = {
    "heads": Structure(
        noun="head groups",
        owner="each layer",
        criteria=UNIT_CRITERIA,
        weights=group_weights,
        total=lambda anatomy: anatomy.blocks[0].attention.kv_heads,
        count=nearest,
        plan=group_plan,
        parts=lambda anatomy: [block.attention.name for block in anatomy.blocks],
        uneven=True,
    ),
    "query-heads": Structure(
        noun="query heads",
        owner="each KV head",
        criteria=UNIT_CRITERIA,
        weights=query_weights,
        total=lambda anatomy: anatomy.blocks[0].attention.heads // anatomy.blocks[0].attention.kv_heads,
        count=nearest,
        plan=query_plan,
        parts=lambda anatomy: [
            f"{block.attention.name} group {group}"
            for block in anatomy.blocks
            for group in range(block.attention.kv_heads)
        ],
    ),
    "neurons": Structure(
        noun="neurons",
        owner="each layer",
        criteria=UNIT_CRITERIA,
        weights=neuron_weights,
        total=lambda anatomy: anatomy.blocks[0].mlp.neurons,
        count=lambda total, options: snapped(total, options, "neurons of a layer"),
        plan=lambda anatomy, keep: CutPlan(neurons=tuple(tuple(kept) for kept in keep)),
        parts=lambda anatomy: [block.mlp.name for block in anatomy.blocks],
        uneven=True,
    ),
    "hidden": Structure(
        noun="channels",
        owner="the residual stream",
        criteria=HIDDEN_CRITERIA,
        weights=no_weights,
        total=lambda anatomy: anatomy.hidden_size,
        count=lambda total, options: snapped(total, options, "channels"),
        plan=lambda anatomy, keep: CutPlan(hidden=tuple(keep[0])),
        parts=lambda anatomy: ["residual stream"],
    ),
    "layers": Structure(
        noun="layers",
        owner="the model",
        criteria=LAYER_CRITERIA,
        weights=no_weights,
        total=lambda anatomy: len(anatomy.blocks),
        count=nearest,
        plan=lambda anatomy, keep: CutPlan(layers=tuple(keep[0])),
        parts=lambda anatomy: [anatomy.blocks_name],
    ),
}
