"""The sizes of a student, from the teacher's config alone: what cannot be is refused before any work.

To a size, depth goes first: whole layers, down to half of them (students of half the depth keep most; see
``docs/distill.md``); where that is not enough, heads, neurons and channels in one proportion, as large as
fits; and fewer than half of the layers only where no width fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from attar.checkpoint.units import bytes_text, count_text, size_limit
from attar.distillation.layer_map import MEASURED, layer_count, layer_map
from attar.distillation.student_settings import StudentSettings
from attar.distillation.students.fresh import narrower_config
from attar.errors import SettingsError
from attar.models.anatomy.discover import discover
from attar.models.anatomy.parts import Anatomy
from attar.models.loading.empty import empty_model
from attar.models.surgery.cut_model import cut_model
from attar.models.surgery.cut_plan import CutPlan
from attar.models.surgery.plan_costs import WIDTHS, PlannedModel, PlanSizes
from attar.models.surgery.plan_space import PlanSpace, cut_plan_of, first_units, full_sizes, plan_space

WIDTH_STEPS = 16  # of the proportion in which heads, neurons and channels are tried
SHOWN_DEPTHS = (1.0, 0.75, 0.5, 0.25)  # fractions of the layers whose widest plans are reported


@dataclass(frozen=True)
class StudentPlan:
    """The sizes of a student.

    Attributes:
        full: the teacher's sizes.
        layers: the teacher's layers that stay, or the name of the score that chooses them.
        considered: of a size: other plans within it, in words.
    """

    sizes: PlanSizes
    full: PlanSizes
    layers: tuple[int, ...] | str
    considered: tuple[str, ...] = ()

    @property
    def is_narrower(self) -> bool:
        """Whether units within layers go."""
        return self.sizes._replace(layers=self.full.layers) != self.full

    @property
    def is_scored(self) -> bool:
        """Whether units are chosen by scores."""
        return self.is_narrower or isinstance(self.layers, str)

    def lines(self) -> list[str]:
        """The plan in words, with the others where there were any."""
        lines = [f"student: {self.sizes.text(self.full)}"] if self.sizes != self.full else []
        return lines + [f"  within the size: {plan}" for plan in self.considered]

    def record(self) -> dict[str, Any]:
        """For the card."""
        cut: dict[str, Any] = {"cut": self.sizes.text(self.full)}
        if isinstance(self.layers, str):
            cut["layers_by"] = self.layers
        return cut | ({"considered": list(self.considered)} if self.considered else {})


def plan_student(config: Mapping[str, Any], storage: torch.dtype, settings: StudentSettings) -> StudentPlan:
    """The student's sizes.

    Args:
        config: of the teacher, as in its config.json.
        storage: the type in which the student is stored, for sizes in bytes.

    Raises:
        SettingsError: the teacher has fewer units, or no student is as small.
        ModelError: the family's config cannot say the sizes.
    """
    if settings.size:
        return _plan_to_size(plan_space(config, storage), settings)
    empty = empty_model(config)
    anatomy = discover(empty)
    depth = len(anatomy.blocks)
    keep = settings.keep_layers or (1.0 if settings.is_narrower else 0.5)
    count = layer_count(settings.layer_map, depth, settings.layers, keep)
    layers = _layers(settings.layer_map, depth, count)
    if settings.width:
        numbers = layers if isinstance(layers, tuple) else tuple(range(count))
        narrower_config(cut_model(empty, CutPlan(layers=numbers)), settings.width)
    if not settings.is_narrower:
        full = PlanSizes(0, 0, anatomy.hidden_size, depth)
        return StudentPlan(full._replace(layers=count), full, layers)
    full = full_sizes(anatomy)
    sizes = _widths(anatomy, full, settings)._replace(layers=count)
    first = tuple(range(count)) if isinstance(layers, str) else layers
    cut_model(empty, cut_plan_of(anatomy, full, sizes, first_units(full), first))
    return StudentPlan(sizes, full, layers)


def _layers(kind: str, depth: int, count: int) -> tuple[int, ...] | str:
    """The numbers of a map; a score's name stays, unless no layer goes."""
    if count == depth:
        return tuple(range(depth))
    return kind if kind in MEASURED else tuple(layer_map(kind, depth, count))


def _widths(anatomy: Anatomy, full: PlanSizes, settings: StudentSettings) -> PlanSizes:
    """The sizes of the settings."""
    attention = anatomy.blocks[0].attention
    readers = attention.heads // attention.kv_heads
    if settings.heads % readers or settings.heads > attention.heads:
        allowed = f"a multiple of {readers} (the heads of a KV head) up to the teacher's {attention.heads}"
        raise SettingsError("heads", settings.heads, allowed)
    counts = {"heads": settings.heads // readers, "neurons": settings.neurons, "hidden": settings.hidden}
    for name, count in counts.items():
        if count > getattr(full, name):
            raise SettingsError(name, count, f"at most the teacher's {getattr(full, name)}")
    return full._replace(**{name: count for name, count in counts.items() if count})


def _plan_to_size(space: PlanSpace, settings: StudentSettings) -> StudentPlan:
    budget = SizeBudget(space.planned, *size_limit("size", settings.size))
    full, least = space.full, 1 if "layers" in space.structures else space.full.layers
    if budget.fits(full):
        raise SettingsError("size", settings.size, f"below the teacher's {budget.amount(full)}")
    half = max(-(-full.layers // 2), least)
    shallower = (full._replace(layers=depth) for depth in range(full.layers - 1, half - 1, -1))
    narrower = (_widest(space, budget, depth) for depth in range(half, least - 1, -1))
    fitting = chain(filter(budget.fits, shallower), filter(None, narrower))
    chosen = next(fitting, None)
    if chosen is None:
        smallest = _at_width(space, 0.0, least)
        allowed = f"at least {budget.amount(smallest)}: {smallest.text(full)}"
        raise SettingsError("size", settings.size, allowed)
    depths = dict.fromkeys(max(round(share * full.layers), least) for share in SHOWN_DEPTHS)
    others = filter(None, (_widest(space, budget, depth) for depth in depths))
    words = [f"{plan.text(full)}: {budget.amount(plan)}" for plan in dict.fromkeys([chosen, *others])]
    return StudentPlan(chosen, full, _layers(settings.layer_map, full.layers, chosen.layers), tuple(words))


def _widest(space: PlanSpace, budget: SizeBudget, depth: int) -> PlanSizes | None:
    """The widest plan of a depth within the budget: all widths near one proportion, then as many neurons and
    channels as still fit."""

    def possible(sizes: PlanSizes) -> bool:
        return budget.fits(sizes) and space.allows(sizes)

    steps = (_at_width(space, step / WIDTH_STEPS, depth) for step in range(WIDTH_STEPS, 0, -1))
    plan = next(filter(possible, steps), None)
    if plan is None:
        return None
    for name in ("neurons", "hidden"):
        counts = [count for count in getattr(space.grid, name) if count >= getattr(plan, name)]
        wider = [plan._replace(**{name: count}) for count in reversed(counts)]
        plan = next(filter(possible, wider), plan)
    return plan


def _at_width(space: PlanSpace, share: float, depth: int) -> PlanSizes:
    """The plan of a depth whose widths are nearest to a share of the teacher's."""
    widths = {name: _nearest(getattr(space.grid, name), share) for name in WIDTHS}
    return PlanSizes(**widths, layers=depth)


def _nearest(counts: tuple[int, ...], share: float) -> int:
    """Of ascending numbers, the one nearest to a share of the last."""
    return min(counts, key=lambda count: abs(count - share * counts[-1]))


@dataclass(frozen=True)
class SizeBudget:
    """The most parameters, or bytes, of a student.

    Attributes:
        kind: ``parameters`` or ``bytes``.
    """

    planned: PlannedModel
    kind: str
    limit: int

    def cost(self, sizes: PlanSizes) -> int:
        """Parameters or bytes of a plan."""
        count = self.planned.parameters if self.kind == "parameters" else self.planned.file_bytes
        return count(sizes)

    def fits(self, sizes: PlanSizes) -> bool:
        """Whether a plan is small enough."""
        return self.cost(sizes) <= self.limit

    def amount(self, sizes: PlanSizes) -> str:
        """What a plan has of it, in words."""
        cost = self.cost(sizes)
        return f"{count_text(cost)} parameters" if self.kind == "parameters" else bytes_text(cost)
