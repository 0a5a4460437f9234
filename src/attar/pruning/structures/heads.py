"""Attention heads: in groups, a KV head with all the query heads that read it, or query heads alone.

Minitron (arXiv 2407.14679) ranks query heads within their group, removes the same number from each and leaves
the KV heads: the query projections and the output projection get smaller, the KV cache does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from attar.models.anatomy.parts import Anatomy, weight_of
from attar.models.anatomy.unit_weights import group_weights, query_weights
from attar.models.surgery.cut_plan import CutPlan, heads_of_groups
from attar.pruning.criteria import UNIT_CRITERIA
from attar.pruning.structures.structure import Structure, nearest


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


HEADS = Structure(
    noun="head groups",
    owner="each layer",
    criteria=UNIT_CRITERIA,
    weights=group_weights,
    total=lambda anatomy: anatomy.blocks[0].attention.kv_heads,
    count=nearest,
    plan=group_plan,
    parts=lambda anatomy: [block.attention.name for block in anatomy.blocks],
    uneven=True,
)
QUERY_HEADS = Structure(
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
)
