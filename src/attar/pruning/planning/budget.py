"""The budget of a plan: a share of the parameters, a size of the file, or a speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attar.checkpoint.units import byte_count, bytes_text
from attar.errors import SettingsError, UsageError
from attar.models.surgery.plan_costs import (
    PlanGrid,
    PlannedModel,
    PlannedTensor,
    PlanSizes,
    byte_cost,
    parameter_cost,
    read_cost,
)
from attar.pruning.settings import MixedSettings, speed_factor


@dataclass(frozen=True)
class PlanBudget:
    """The most that a plan may cost.

    Attributes:
        option, value: of the settings.
        cost: of one element of a tensor; limit: of the sum over all of them.
        fits: whether a plan within the limit fits in full (a file has a header too).
        amount: what a plan has of ``option``, in words.
    """

    option: str
    value: str | float
    cost: Callable[[PlannedTensor], float]
    limit: float
    fits: Callable[[PlanSizes], bool]
    amount: Callable[[PlanSizes], str]

    def check(self, planned: PlannedModel, grid: PlanGrid) -> None:
        """Refuse a budget that no plan meets, or that the uncut model meets.

        Raises:
            SettingsError: names the nearest plan.
            UsageError: nothing would be removed.
        """
        costs = planned.over(grid, self.cost)
        smallest = grid.plan(int(costs.argmin()))
        if not (float(costs.min()) <= self.limit and self.fits(smallest)):
            allowed = f"at {'most' if self.option != 'size' else 'least'} {self.amount(smallest)}"
            raise SettingsError(self.option, self.value, f"{allowed}: {smallest.text(planned.full)}")
        full_cost = float(planned.over(PlanGrid(*((size,) for size in planned.full)), self.cost))
        if full_cost <= self.limit and self.fits(planned.full):
            raise UsageError(
                f"--{self.option} {self.value} removes nothing: the model has {self.amount(planned.full)}",
                hint=f"a {'smaller' if self.option == 'size' else 'larger'} --{self.option}",
            )


def plan_budget(planned: PlannedModel, options: MixedSettings) -> PlanBudget:
    """The budget of the settings: ``size`` or ``speed`` where given, else ``ratio``."""
    if options.size:
        return _size_budget(planned, options.size)
    if options.speed:
        return _speed_budget(planned, options.speed)
    full_count = planned.parameters(planned.full)

    def removed(sizes: PlanSizes) -> str:
        share = 1 - planned.parameters(sizes) / full_count
        return f"{int(share * 1000) / 1000:g}" if sizes != planned.full else f"{full_count:,} parameters"

    limit = (1 - options.ratio) * full_count
    return PlanBudget("ratio", options.ratio, parameter_cost, limit, lambda _: True, removed)


def _size_budget(planned: PlannedModel, size: str) -> PlanBudget:
    limit = byte_count("size", size)

    def fits(sizes: PlanSizes) -> bool:
        return planned.file_bytes(sizes) <= limit

    def amount(sizes: PlanSizes) -> str:
        count = planned.file_bytes(sizes)
        return f"{count}B ({bytes_text(count)})"

    return PlanBudget("size", size, byte_cost, float(limit), fits, amount)


def _speed_budget(planned: PlannedModel, speed: str) -> PlanBudget:
    full_bytes = planned.read_bytes(planned.full)

    def amount(sizes: PlanSizes) -> str:
        return f"{int(full_bytes / planned.read_bytes(sizes) * 100) / 100:g}x"

    return PlanBudget("speed", speed, read_cost, full_bytes / speed_factor(speed), lambda _: True, amount)
