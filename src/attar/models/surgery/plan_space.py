"""The plans that a model allows: which structures its config can have fewer of, in which numbers, and how
each stored tensor shrinks. Everything is tried on a model without weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from attar.checkpoint.tensors import BITS, stored_dtype
from attar.errors import ModelError
from attar.models.anatomy.discover import discover
from attar.models.anatomy.parts import Anatomy
from attar.models.loading.empty import empty_model
from attar.models.surgery.cut_model import cut_model, head_counts
from attar.models.surgery.cut_plan import CutPlan, heads_of_groups
from attar.models.surgery.plan_costs import (
    STRUCTURES,
    WIDTHS,
    PlanGrid,
    PlannedModel,
    PlannedTensor,
    PlanSizes,
)

POINTS = 8  # amounts of a structure that are measured
CHOICES = 24  # about as many amounts that a plan may have
StoredShapes = dict[str, tuple[int, ...]]
LEAST = {"heads": 1 / 8, "neurons": 1 / 8, "hidden": 1 / 4, "layers": 1 / 4}  # shares that stay at least


@dataclass(frozen=True)
class UnitRanking:
    """Units of the whole model, the most important first.

    Attributes:
        heads, neurons: of each layer, KV groups and neurons.
        hidden: channels.
    """

    heads: Sequence[Sequence[int]] = ()
    neurons: Sequence[Sequence[int]] = ()
    hidden: Sequence[int] = ()


@dataclass(frozen=True)
class PlanSpace:
    """The plans that a model allows.

    Attributes:
        empty: the model without weights.
        planned: its tensors, and how cuts shrink them; layers go in their order.
        refused: why its config cannot have fewer units of a structure, by structure.
        measured: the amounts that a scan measures.
        grid: the amounts that a plan may have, all within those measured.
    """

    empty: Any
    anatomy: Anatomy
    planned: PlannedModel
    refused: Mapping[str, str]
    measured: PlanGrid
    grid: PlanGrid

    @property
    def full(self) -> PlanSizes:
        """The uncut model."""
        return self.planned.full

    @property
    def structures(self) -> tuple[str, ...]:
        """The structures that can be cut."""
        return tuple(name for name in STRUCTURES if name not in self.refused)

    def cut_plan(
        self, sizes: PlanSizes, ranking: UnitRanking, layers: Sequence[int], alone: int | None = None
    ) -> CutPlan:
        """The units that stay.

        Args:
            layers: the layers that stay.
            alone: the layer whose heads or neurons are cut, no other's; None: all.
        """
        return cut_plan_of(self.anatomy, self.full, sizes, ranking, layers, alone)

    def allows(self, sizes: PlanSizes) -> bool:
        """Whether the config can say a plan."""
        plan = self.cut_plan(sizes, first_units(self.full), range(sizes.layers))
        return not isinstance(_cut(self.empty, plan), str)


def cut_plan_of(
    anatomy: Anatomy,
    full: PlanSizes,
    sizes: PlanSizes,
    ranking: UnitRanking,
    layers: Sequence[int],
    alone: int | None = None,
) -> CutPlan:
    """The units of these sizes that stay; see :meth:`PlanSpace.cut_plan`."""
    heads = neurons = None
    if sizes.heads < full.heads:
        kept = _best(ranking.heads, sizes.heads, alone)
        pairs = zip(anatomy.blocks, kept, strict=True)
        heads = tuple(heads_of_groups(block.attention, groups) for block, groups in pairs)
    if sizes.neurons < full.neurons:
        neurons = _best(ranking.neurons, sizes.neurons, alone)
    hidden = tuple(sorted(ranking.hidden[: sizes.hidden])) if sizes.hidden < full.hidden else None
    return CutPlan(heads, neurons, hidden, tuple(layers) if len(layers) < full.layers else None)


def _best(ranked: Sequence[Sequence[int]], count: int, alone: int | None) -> tuple[tuple[int, ...], ...]:
    """Of each layer, its first units, ascending; all of them but for the layer cut alone."""
    counts = [count if alone in (None, layer) else len(units) for layer, units in enumerate(ranked)]
    return tuple(tuple(sorted(units[:number])) for units, number in zip(ranked, counts, strict=True))


def first_units(full: PlanSizes) -> UnitRanking:
    """The ranking by number, for a model without weights."""
    heads, neurons = ([range(units)] * full.layers for units in (full.heads, full.neurons))
    return UnitRanking(heads, neurons, range(full.hidden))


def _cut(empty: Any, plan: CutPlan) -> Any:
    """The cut model; where the config cannot say it, why."""
    try:
        return cut_model(empty, plan)
    except ModelError as error:
        return error.message


def plan_space(config: Mapping[str, Any], storage: torch.dtype) -> PlanSpace:
    """What may be cut from the model of a parsed config.json.

    Args:
        storage: the type in which weights are stored.

    Raises:
        ModelError: its layers differ in size, or nothing can be cut.
    """
    empty = empty_model(config)
    anatomy = discover(empty)
    full = full_sizes(anatomy)
    measured, grid = _grids(empty, full)
    refused, shrunk = {}, dict[str, StoredShapes]()
    for name in STRUCTURES:
        units, smallest = getattr(full, name), min(getattr(measured, name))
        smallest = smallest if smallest < units else max(round(LEAST[name] * units), 1)
        least = full._replace(**{name: smallest})
        plan = cut_plan_of(anatomy, full, least, first_units(full), range(least.layers))
        cut = _cut(empty, plan) if least != full else "one must stay"
        if isinstance(cut, str):
            refused[name] = cut
        elif name in WIDTHS:
            shrunk[name] = _shrinkage(_shapes(empty), _shapes(cut), units - smallest)
    if len(refused) == len(STRUCTURES):
        raise ModelError(f"{anatomy.family}: nothing can be cut: {refused['neurons']}")
    uncut = {name: (getattr(full, name),) for name in refused}
    planned = PlannedModel(full, _planned(empty, anatomy, shrunk, storage), tuple(range(full.layers)))
    measured, grid = (amounts._replace(**uncut) for amounts in (measured, grid))
    return PlanSpace(empty, anatomy, planned, refused, measured, grid)


def full_sizes(anatomy: Anatomy) -> PlanSizes:
    """The sizes of the uncut model.

    Raises:
        ModelError: its layers differ in size.
    """
    sizes = {(block.attention.kv_heads, block.mlp.neurons) for block in anatomy.blocks}
    if len(sizes) > 1:
        raise ModelError(
            f"{anatomy.family}: its layers differ in size, and a plan has one size for all",
            hint="--method layers, neurons or heads",
        )
    return PlanSizes(*sizes.pop(), anatomy.hidden_size, len(anatomy.blocks))


def _grids(empty: Any, full: PlanSizes) -> tuple[PlanGrid, PlanGrid]:
    """The amounts that are measured, and those of plans."""
    measured, choices = dict[str, tuple[int, ...]](), dict[str, tuple[int, ...]]()
    possible = head_counts(empty)
    for name in STRUCTURES:
        units = getattr(full, name)
        least, multiple = max(round(LEAST[name] * units), 1), snap(name, units)
        measured[name] = steps(units, multiple, least, POINTS)
        choices[name] = steps(units, multiple, measured[name][0], max(CHOICES, units // multiple))
        if name == "heads":
            measured[name] = tuple(count for count in measured[name] if count in possible) or (units,)
            choices[name] = tuple(count for count in possible if count >= measured[name][0])
    return PlanGrid(**measured), PlanGrid(**choices)


def steps(full: int, multiple: int, least: int, most: int) -> tuple[int, ...]:
    """At most ``most`` numbers of units from ``least`` to ``full``, evenly spread, as multiples but for
    ``full``; ascending."""
    if full <= least:
        return (full,)
    wanted = [least + (full - least) * number / (most - 1) for number in range(most)]
    snapped = {max(multiple, round(value / multiple) * multiple) for value in wanted}
    return tuple(sorted({value for value in snapped if least <= value < full} | {full}))


def snap(name: str, units: int) -> int:
    """The multiple that a plan keeps of neurons and channels: the largest power of two up to 256 of which the
    model has about 16 or more, and at least 32 where it has several, for groups and kernels."""
    if name in ("heads", "layers"):
        return 1
    fitting = [multiple for multiple in (256, 128, 64, 32, 16, 8, 4, 2, 1) if units % multiple == 0]
    wanted = next((multiple for multiple in fitting if units // multiple >= 16), 1)
    return max(wanted, 32) if units >= 128 and units % 32 == 0 else wanted


def _planned(
    empty: Any, anatomy: Anatomy, shrunk: Mapping[str, StoredShapes], storage: torch.dtype
) -> tuple[PlannedTensor, ...]:
    """All tensors of a checkpoint of the model.

    Args:
        shrunk: what a unit takes from each size of each tensor, by structure.
    """
    tensors = []
    for name, tensor in _tensors(empty).items():
        stored = stored_dtype(storage if tensor.is_floating_point() else tensor.dtype)
        none = (0,) * tensor.dim()
        columns = [shrunk[structure][name] if structure in shrunk else none for structure in WIDTHS]
        tensors.append(
            PlannedTensor(
                name=_file_name(empty, name, tensor),
                block=_block_of(anatomy, name),
                dtype=stored,
                bits=BITS[stored],
                shape=tuple(tensor.shape),
                shrink=tuple(zip(*columns, strict=True)),
                looked_up=_is_looked_up(anatomy, name.rpartition(".")[0]),
            )
        )
    return tuple(tensors)


def _shrinkage(before: StoredShapes, after: StoredShapes, removed: int) -> StoredShapes:
    """What one unit takes from each size of each tensor."""
    return {
        name: tuple((old - new) // removed for old, new in zip(shape, after[name], strict=True))
        for name, shape in before.items()
    }


def _block_of(anatomy: Anatomy, name: str) -> int | None:
    """Number of the block that a tensor belongs to."""
    prefix = f"{anatomy.blocks_name}."
    return int(name.removeprefix(prefix).partition(".")[0]) if name.startswith(prefix) else None


def _is_looked_up(anatomy: Anatomy, module: str) -> bool:
    """Whether one row of the module's weight is read for a token."""
    return module == anatomy.positions or (module == anatomy.embedding and not anatomy.tied)


def _file_name(model: Any, name: str, tensor: Tensor) -> str:
    """A tensor's name in the files that transformers writes (GPT-NeoX's head has an older one there)."""
    names = list(revert_weight_conversion(model, {name: tensor}))
    return str(names[0]) if len(names) == 1 else name


def _shapes(model: Any) -> StoredShapes:
    """Shape of every tensor of a checkpoint of the model."""
    return {name: tuple(tensor.shape) for name, tensor in _tensors(model).items()}


def _tensors(model: Any) -> dict[str, Tensor]:
    """Every tensor of a checkpoint of the model: tied ones under their first name."""
    first: dict[int, str] = {}
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        first.setdefault(id(tensor), name)
    return {name: state[name] for name in first.values()}
