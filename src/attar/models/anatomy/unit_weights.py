"""The weights of the units that can be removed from a block: heads, in groups or alone, and neurons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attar.models.anatomy.parts import Anatomy, Attention, weight_of


@dataclass(frozen=True)
class UnitWeights:
    """The weights of one layer's units.

    Attributes:
        consumer: the Linear that follows the units; a mask multiplies its inputs.
        columns: the unit of each of its inputs, int64 (F,).
        producers: modules whose rows belong to units, each with the unit of every stored row; -1: of none.
    """

    consumer: nn.Module
    columns: Tensor
    producers: tuple[tuple[nn.Module, Tensor], ...] = ()

    @property
    def count(self) -> int:
        """How many units the layer has."""
        return int(self.columns.max()) + 1

    def sums(self, values: Tensor) -> Tensor:
        """Sums (U,) of values (F,) over the columns of each unit."""
        return values.new_zeros(self.count).index_add(0, self.columns.to(values.device), values)


def group_weights(model: nn.Module, anatomy: Anatomy) -> list[UnitWeights]:
    """Of each KV group its rows of q, k and v and its columns of o."""
    layers = []
    for attention in (block.attention for block in anatomy.blocks):
        groups = attention.groups()
        rows = (
            (attention.q, [group.q_rows for group in groups]),
            (attention.k, [group.k_rows for group in groups]),
            (attention.v, [group.v_rows for group in groups]),
        )
        columns = units_of([group.o_columns for group in groups], attention.o.in_features)
        layers.append(_weights(model, attention, columns, rows))
    return layers


def query_weights(model: nn.Module, anatomy: Anatomy) -> list[UnitWeights]:
    """Of each query head its rows of q and its columns of o."""
    layers = []
    for attention in (block.attention for block in anatomy.blocks):
        heads = range(attention.heads)
        rows = ((attention.q, [attention.query_rows(head) for head in heads]),)
        columns = units_of([attention.query_columns(head) for head in heads], attention.o.in_features)
        layers.append(_weights(model, attention, columns, rows))
    return layers


def _weights(
    model: nn.Module, attention: Attention, columns: torch.Tensor, rows: Sequence[Any]
) -> UnitWeights:
    producers = []
    for part, units in rows:
        module = model.get_submodule(part.name)
        producers.append((module, owners_of(units, weight_of(module).shape[0])))
    return UnitWeights(model.get_submodule(attention.o.name), columns, tuple(producers))


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


def units_of(columns: Sequence[Sequence[int]], features: int) -> Tensor:
    """The unit of each input column, int64 (F,), from the columns of each unit."""
    owner = owners_of(columns, features)
    assert (owner >= 0).all(), "every column belongs to a unit"
    return owner


def owners_of(indices: Sequence[Sequence[int]], size: int) -> Tensor:
    """The unit of each index, int64 (size,), from the indices of each unit; -1: of none."""
    owner = torch.full((size,), -1, dtype=torch.int64)
    for unit, inside in enumerate(indices):
        owner[torch.as_tensor(inside)] = unit
    return owner
