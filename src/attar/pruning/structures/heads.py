"""Attention heads, in groups: a KV head with all the query heads that read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attar.errors import ModelError
from attar.models.anatomy import discover
from attar.models.load import empty_model
from attar.models.parts import Anatomy, weight_of
from attar.models.surgery import keep_heads
from attar.pruning.settings import HeadSettings
from attar.pruning.structures.structure import Structure, UnitCut, units_of


def head_units(model: nn.Module, anatomy: Anatomy) -> tuple[list[nn.Module], list[Tensor]]:
    """Per layer, the output projection and the KV group of each of its inputs."""
    attentions = [block.attention for block in anatomy.blocks]
    modules = [model.get_submodule(attention.o.name) for attention in attentions]
    columns = [[group.o_columns for group in attention.groups()] for attention in attentions]
    sizes = [attention.o.in_features for attention in attentions]
    return modules, [units_of(*pair) for pair in zip(columns, sizes, strict=True)]


def head_count(total: int, settings: HeadSettings) -> int:
    """KV groups that stay: the nearest number, at least one."""
    return max(round(total * (1.0 - settings.ratio)), 1)


def head_cut(config: dict[str, Any], anatomy: Anatomy, count: int, settings: HeadSettings) -> UnitCut:
    """How heads are removed; tried on a model without weights.

    Raises:
        ModelError: the family's config has no number for fewer heads, and ``rigid`` is ``error``.
    """
    try:
        keep_heads(empty_model(config), [list(range(count))] * len(anatomy.blocks))
    except ModelError as error:
        if settings.rigid == "zero":
            return zero_heads
        raise ModelError(error.message, hint="--method neurons, or --rigid zero to zero the heads") from error
    return keep_heads


def zero_heads(model: nn.Module, keep: Sequence[Sequence[int]]) -> nn.Module:
    """Zero the output projection's columns of the removed heads, in place. Nothing gets smaller."""
    with torch.no_grad():
        for block, kept in zip(discover(model).blocks, keep, strict=True):
            weight = weight_of(model.get_submodule(block.attention.o.name))
            for number, group in enumerate(block.attention.groups()):
                if number not in kept:
                    weight[:, list(group.o_columns)] = 0.0
    return model


HEADS = Structure("head groups", head_units, head_count, head_cut, lambda block: block.attention.name)
