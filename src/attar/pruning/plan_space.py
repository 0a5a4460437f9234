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
from attar.models.anatomy import discover
from attar.models.cut_plan import CutPlan, heads_of_groups
from attar.models.load import empty_model
from attar.models.parts import Anatomy
from attar.models.surgery import cut_model, head_counts
from attar.pruning.plan_costs import STRUCTURES, WIDTHS, PlanGrid, PlannedModel, PlannedTensor, PlanSizes
from attar.pruning.plans import steps

POINTS = 8  # amounts of a structure that are measured
CHOICES = 24  # about as many amounts that a plan may have
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
        refused: why its config cannot have fewer units of a structure, by structure.
        measured: the amounts that a scan measures.
        grid: the amounts that a plan may have, all within those measured.
    """

    empty: Any
    anatomy: Anatomy
    full: PlanSizes
    refused: Mapping[str, str]
    measured: PlanGrid
    grid: PlanGrid

    @property
    def structures(self) -> tuple[str, ...]:
        """The structures that can be cut."""
        return tuple(name for name in STRUCTURES if name not in self.refused)

    def cut_plan(
        self, sizes: PlanSizes, ranking: UnitRanking, layers: Sequence[int], alone: int | None = None
    ) -> CutPlan:
        """The units that stay.

        Args:
            layers: those that stay.
            alone: the layer whose heads or neurons are cut, no other's; None: all.
        """
        heads = neurons = None
        blocks = self.anatomy.blocks
        if sizes.heads < self.full.heads:
            kept = _best(ranking.heads, sizes.heads, alone)
            pairs = zip(blocks, kept, strict=True)
            heads = tuple(heads_of_groups(block.attention, groups) for block, groups in pairs)
        if sizes.neurons < self.full.neurons:
            neurons = _best(ranking.neurons, sizes.neurons, alone)
        hidden = tuple(sorted(ranking.hidden[: sizes.hidden])) if sizes.hidden < self.full.hidden else None
        return CutPlan(heads, neurons, hidden, tuple(layers) if len(layers) < self.full.layers else None)

    def allows(self, sizes: PlanSizes) -> bool:
        """Whether the config can say a plan."""
        return not _refusal(self.empty, self.cut_plan(sizes, first_units(self.full), range(sizes.layers)))


def _best(ranked: Sequence[Sequence[int]], count: int, alone: int | None) -> tuple[tuple[int, ...], ...]:
    """Of each layer, its first units, ascending; all of them but for the layer cut alone."""
    counts = [count if alone in (None, layer) else len(units) for layer, units in enumerate(ranked)]
    return tuple(tuple(sorted(units[:number])) for units, number in zip(ranked, counts, strict=True))


def first_units(full: PlanSizes) -> UnitRanking:
    """The ranking by number, for a model without weights."""
    heads, neurons = ([range(units)] * full.layers for units in (full.heads, full.neurons))
    return UnitRanking(heads, neurons, range(full.hidden))


def plan_space(config: Mapping[str, Any]) -> PlanSpace:
    """What may be cut from the model of a parsed config.json.

    Raises:
        ModelError: its layers differ in size, or nothing can be cut.
    """
    empty = empty_model(config)
    anatomy = discover(empty)
    sizes = {(block.attention.kv_heads, block.mlp.neurons) for block in anatomy.blocks}
    if len(sizes) > 1:
        raise ModelError(
            f"{anatomy.family}: its layers differ in size, and a plan has one size for all",
            hint="--method layers, neurons or heads",
        )
    full = PlanSizes(*sizes.pop(), anatomy.hidden_size, len(anatomy.blocks))
    measured, grid = _grids(empty, full)
    space = PlanSpace(empty, anatomy, full, {}, measured, grid)
    refused = {}
    for name in STRUCTURES:
        units, smallest = getattr(full, name), min(getattr(measured, name))
        smallest = smallest if smallest < units else max(round(LEAST[name] * units), 1)
        least = full._replace(**{name: smallest})
        plan = space.cut_plan(least, first_units(full), range(least.layers))
        refusal = "one must stay" if least == full else _refusal(empty, plan)
        if refusal:
            refused[name] = refusal
    if len(refused) == len(STRUCTURES):
        raise ModelError(f"{anatomy.family}: nothing can be cut: {refused['neurons']}")
    uncut = {name: (getattr(full, name),) for name in refused}
    return PlanSpace(empty, anatomy, full, refused, measured._replace(**uncut), grid._replace(**uncut))


def _refusal(empty: Any, plan: CutPlan) -> str:
    """Why the config cannot say a plan; empty where it can."""
    try:
        cut_model(empty, plan)
    except ModelError as error:
        return error.message
    return ""


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
    if units > CHOICES:
        choices["layers"] = tuple(range(measured["layers"][0], units + 1))
    return PlanGrid(**measured), PlanGrid(**choices)


def snap(name: str, units: int) -> int:
    """The multiple that a plan keeps of neurons and channels: the largest power of two up to 256 of which the
    model has about 16 or more, and at least 32 where it has several, for groups and kernels."""
    if name in ("heads", "layers"):
        return 1
    fitting = [multiple for multiple in (256, 128, 64, 32, 16, 8, 4, 2, 1) if units % multiple == 0]
    wanted = next((multiple for multiple in fitting if units // multiple >= 16), 1)
    return max(wanted, 32) if units >= 128 and units % 32 == 0 else wanted


def planned_model(space: PlanSpace, removal: Sequence[int], storage: torch.dtype) -> PlannedModel:
    """How each tensor of the checkpoint shrinks.

    Args:
        removal: layers in the order in which they go.
        storage: the type in which weights are stored.
    """
    before = _shapes(space.empty)
    shrunk: dict[str, list[list[int]]] = {
        name: [[0, 0, 0] for _ in shape] for name, (shape, _) in before.items()
    }
    for axis, structure in enumerate(WIDTHS):
        if structure in space.refused:
            continue
        count = min(getattr(space.measured, structure))
        sizes = space.full._replace(**{structure: count})
        cut = cut_model(space.empty, space.cut_plan(sizes, first_units(space.full), range(sizes.layers)))
        removed = getattr(space.full, structure) - count
        for name, (shape, _) in _shapes(cut).items():
            for number, (old, new) in enumerate(zip(before[name][0], shape, strict=True)):
                shrunk[name][number][axis] = (old - new) // removed
    tensors = []
    for name, (shape, dtype) in before.items():
        stored = stored_dtype(storage if dtype.is_floating_point else dtype)
        tensors.append(
            PlannedTensor(
                name=_file_name(space.empty, name),
                block=_block_of(space.anatomy, name),
                dtype=stored,
                bits=BITS[stored],
                shape=shape,
                shrink=tuple(map(tuple, shrunk[name])),
                looked_up=_is_looked_up(space.anatomy, name.rpartition(".")[0]),
            )
        )
    return PlannedModel(space.full, tuple(tensors), tuple(removal))


def _block_of(anatomy: Anatomy, name: str) -> int | None:
    """Number of the block that a tensor belongs to."""
    prefix = f"{anatomy.blocks_name}."
    return int(name.removeprefix(prefix).partition(".")[0]) if name.startswith(prefix) else None


def _is_looked_up(anatomy: Anatomy, module: str) -> bool:
    """Whether one row of the module's weight is read for a token."""
    return module == anatomy.positions or (module == anatomy.embedding and not anatomy.tied)


def _file_name(model: Any, name: str) -> str:
    """A tensor's name in the files that transformers writes (GPT-NeoX's head has an older one there)."""
    names = list(revert_weight_conversion(model, {name: model.state_dict()[name]}))
    return str(names[0]) if len(names) == 1 else name


def _shapes(model: Any) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of every tensor of a checkpoint of the model: tied ones under their first name."""
    seen: set[int] = set()
    shapes = {}
    tensor: Tensor
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            shapes[name] = (tuple(tensor.shape), tensor.dtype)
    return shapes
