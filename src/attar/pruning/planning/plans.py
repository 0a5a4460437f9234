"""Plans of structured pruning: how much of every structure stays, and the loss of quality predicted for it.

    KL(plan) ~ sum_s KL_s(n_s)

Letters: s structure (heads, neurons, hidden, layers); n_s its units that stay; KL_s the model's KL with s
alone cut (scan.py), measured at some n_s. Between two of them sqrt(KL) is interpolated, because a small
change costs the square of its size.

The sum is an approximation, as in mixed precision: cuts act on each other. So the few plans of the smallest
sums are measured before one is chosen (mixed.py), and plans that cut a single structure are among them.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from attar.models.surgery.plan_costs import STRUCTURES, WIDTHS, PlanGrid, PlanSizes

DISTINCT = 8  # plans differ if some structure differs by a unit and by an eighth of the model's units


@dataclass(frozen=True)
class QualityCurve:
    """KL against the units of one structure that stay, nats a token.

    Attributes:
        points: (units, KL) in ascending units; the last has all of them and no KL.
    """

    points: tuple[tuple[int, float], ...]

    def __call__(self, units: int) -> float:
        """The KL at a number of units within the points."""
        counts = [count for count, _ in self.points]
        right = bisect.bisect_left(counts, units)
        if counts[right] == units:
            return self.points[right][1]
        (low, high_kl), (high, low_kl) = self.points[right - 1], self.points[right]
        share = (units - low) / (high - low)
        return float(((1 - share) * math.sqrt(high_kl) + share * math.sqrt(low_kl)) ** 2)


def predicted_kl(curves: Mapping[str, QualityCurve], grid: PlanGrid) -> Tensor:
    """The sum of the structures' KLs for every plan of a grid, float64 (heads, neurons, hidden, layers)."""
    total = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    for axis, name in enumerate(STRUCTURES):
        values = [curves[name](units) if name in curves else 0.0 for units in getattr(grid, name)]
        total = total + torch.tensor(values, dtype=torch.float64).reshape(
            [-1 if axis == other else 1 for other in range(4)]
        )
    return total


def plans_within(predicted: Tensor, cost: Tensor, budget: float, grid: PlanGrid) -> Iterator[PlanSizes]:
    """The plans of a grid whose cost is at most the budget, of the smallest predicted KL first; equal ones by
    cost."""
    cost, predicted = cost.flatten(), predicted.expand_as(cost).flatten()
    inside = (cost <= budget).nonzero().flatten()
    inside = inside[torch.argsort(cost[inside], stable=True)]
    inside = inside[torch.argsort(predicted[inside], stable=True)]
    return (grid.plan(int(flat)) for flat in inside)


def are_distinct(a: PlanSizes, b: PlanSizes, full: PlanSizes) -> bool:
    """Whether two plans differ by more than a nuance."""
    return any(abs(x - y) >= max(1, size / DISTINCT) for x, y, size in zip(a, b, full, strict=True))


def shortlist(
    candidates: Callable[[PlanGrid], Iterator[PlanSizes]],
    accepts: Callable[[PlanSizes], bool],
    grid: PlanGrid,
    full: PlanSizes,
    count: int,
) -> list[PlanSizes]:
    """The best ``count`` distinct plans; then the best of every structure alone, and of all widths without
    layers: rankings may turn when plans are measured, or after recovery.

    Args:
        candidates: the plans of a grid within the budget, the best first.
        accepts: whether a plan is possible, asked of few.
    """
    best: list[PlanSizes] = []
    for plan in candidates(grid):
        if len(best) == count:
            break
        if all(are_distinct(plan, other, full) for other in best) and accepts(plan):
            best.append(plan)
    for free in (*((name,) for name in STRUCTURES), WIDTHS):
        fixed = {name: (getattr(full, name),) for name in STRUCTURES if name not in free}
        best += list(islice(filter(accepts, candidates(grid._replace(**fixed))), 1))
    return list(dict.fromkeys(best))
