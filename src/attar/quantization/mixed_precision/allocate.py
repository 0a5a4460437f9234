"""Bit allocation as a multiple-choice knapsack problem (Kellerer, Pferschy, Pisinger 2004, "Knapsack
Problems", chapter 11; the relaxation is Everett 1963, "Generalized Lagrange Multiplier Method", and the use
for bit allocation Shoham and Gersho 1988).

    minimise  sum_g loss[g, o_g]    under    sum_g bits[g, o_g] <= B          one option o_g for each group g

    for any lambda >= 0:   optimum >= L(lambda) = sum_g min_o (loss + lambda bits) - lambda B
    reduced cost:          r[g, o] = loss + lambda bits - min_o (loss + lambda bits)      (>= 0)

1. Options with more bits and more loss than another of their group are removed.
2. The best lambda is the slope at which a walk down the groups' lower convex hulls, steepest step first,
   exceeds the budget; L(lambda) is the lower bound. The walk, continued with the steps that still fit, is a
   first solution of loss U.
3. A solution better than U has sum of r <= U - L. Partial solutions are extended group by group, and dropped
   where they exceed this bound or the budget, or another one is both smaller and better. The best after the
   last group is the optimum. There is no table over B, so the costs may have any unit.
4. Of more than ``states`` partial solutions the solutions of the largest reduced cost are dropped; the
   smallest L + r among them bounds every missed solution, and gives the ``gap``.

Letters: g group, o option, B budget in bits, L lower bound, U upper bound.

A group is a set of modules that must share a scheme (q/k/v; gate/up). The losses of groups are assumed
to add up; see sensitivity.py for how well they do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attar.errors import NumericsError, SettingsError

STATES = 1 << 14


@dataclass(frozen=True)
class Option:
    """One way to store a group.

    Attributes:
        bits: stored bits of the whole group, scales included.
        loss: of quality, in any additive unit.
    """

    name: str
    bits: int
    loss: float


@dataclass(frozen=True)
class Allocation:
    """One option for each group.

    Attributes:
        choice: option's name by group, in the order of the groups.
        gap: no choice within the budget has a loss below ``loss - gap``; 0: this is the optimum.
    """

    choice: dict[str, str]
    loss: float
    bits: int
    gap: float


@dataclass(frozen=True)
class FrontierPoint:
    """A point of the curve of loss over size."""

    bits: int
    loss: float


@dataclass(frozen=True)
class _Step:
    """A step from option ``start`` to ``end`` along a group's convex hull."""

    slope: float  # loss saved for each bit
    group: int
    start: int
    end: int


def allocate(groups: Mapping[str, Sequence[Option]], budget_bits: int, *, states: int = STATES) -> Allocation:
    """The choice of the smallest summed loss whose summed bits stay within the budget.

    Args:
        groups: the options of each group; not modified.
        budget_bits: B.
        states: partial solutions kept at once; more make a gap above 0 rarer.

    Raises:
        SettingsError: the smallest options do not fit (names the smallest possible budget), or a group has
            no option.
        NumericsError: a loss is not finite.
    """
    kept = _kept(groups)
    least = sum(options[0].bits for options in kept)
    if least > budget_bits:
        raise SettingsError(
            "budget_bits", budget_bits, f"at least {least}, every group at its smallest option"
        )
    lam, walked = _walk(kept, budget_bits)
    upper = _loss(kept, walked)
    bound = _dual(kept, lam, budget_bits)
    searched, missed = _search(kept, budget_bits, lam, upper - bound, states)
    picked = walked if searched is None or _cost(kept, walked) <= _cost(kept, searched) else searched
    loss = _loss(kept, picked)
    proven = min(loss, bound + missed)
    names = {group: kept[number][picked[number]].name for number, group in enumerate(groups)}
    return Allocation(names, loss, _bits(kept, picked), max(loss - proven, 0.0))


def frontier(groups: Mapping[str, Sequence[Option]]) -> list[FrontierPoint]:
    """Loss over size, from the smallest options to the best ones: the vertices of the lower convex hull, each
    of them the optimum at its own size.

    Raises:
        SettingsError: a group has no option.
        NumericsError: a loss is not finite.
    """
    kept = _kept(groups)
    bits, loss = sum(options[0].bits for options in kept), math.fsum(options[0].loss for options in kept)
    points = [FrontierPoint(bits, loss)]
    for step in _steps(kept):
        start, end = kept[step.group][step.start], kept[step.group][step.end]
        points.append(
            FrontierPoint(points[-1].bits + end.bits - start.bits, points[-1].loss + end.loss - start.loss)
        )
    return points


def _kept(groups: Mapping[str, Sequence[Option]]) -> list[list[Option]]:
    """Each group's undominated options in ascending bits; their losses fall strictly."""
    kept = []
    for group, options in groups.items():
        if not options:
            raise SettingsError("groups", group, "a group with at least one option")
        for option in options:
            if not math.isfinite(option.loss):
                raise NumericsError(
                    f"{group}: the loss of {option.name} is {option.loss}", hint="measure it again"
                )
        best: list[Option] = []
        for option in sorted(options, key=lambda option: (option.bits, option.loss)):
            if not best or option.loss < best[-1].loss:
                best.append(option)
        kept.append(best)
    return kept


def _hull(options: Sequence[Option]) -> list[int]:
    """Indices of the options on the lower convex hull, from small to large."""
    hull: list[int] = []
    for number, option in enumerate(options):
        while len(hull) > 1 and _slope(options[hull[-2]], options[hull[-1]]) <= _slope(
            options[hull[-1]], option
        ):
            hull.pop()
        hull.append(number)
    return hull


def _slope(small: Option, large: Option) -> float:
    """Loss saved for each bit."""
    return (small.loss - large.loss) / (large.bits - small.bits)


def _steps(kept: Sequence[Sequence[Option]]) -> list[_Step]:
    """Every step along every hull, steepest first; the steps of one group stay in their order."""
    steps = []
    for group, options in enumerate(kept):
        hull = _hull(options)
        for start, end in itertools.pairwise(hull):
            steps.append(_Step(_slope(options[start], options[end]), group, start, end))
    return sorted(steps, key=lambda step: -step.slope)


def _walk(kept: Sequence[Sequence[Option]], budget: int) -> tuple[float, list[int]]:
    """Lambda and a first solution: every step that still fits, steepest first.

    Lambda is the slope of the first step that does not fit; 0 when all do.
    """
    picked = [0] * len(kept)
    left = budget - sum(options[0].bits for options in kept)
    lam: float | None = None
    for step in _steps(kept):
        cost = kept[step.group][step.end].bits - kept[step.group][step.start].bits
        if cost <= left and picked[step.group] == step.start:
            picked[step.group] = step.end
            left -= cost
        elif lam is None:
            lam = step.slope
    return lam or 0.0, picked


def _dual(kept: Sequence[Sequence[Option]], lam: float, budget: int) -> float:
    """L(lambda)."""
    return math.fsum([*(_smallest(options, lam) for options in kept), -lam * budget])


def _smallest(options: Sequence[Option], lam: float) -> float:
    return min(option.loss + lam * option.bits for option in options)


def _search(
    kept: Sequence[Sequence[Option]], budget: int, lam: float, slack: float, states: int
) -> tuple[list[int] | None, float]:
    """The best solution whose reduced costs sum to at most ``slack``, and the smallest sum that was dropped
    for lack of states (infinite: none was).

    A partial solution is (bits, loss, reduced cost); kept solutions are sorted by bits, with falling losses.
    """
    slack += 1e-12 * (1.0 + abs(slack))
    bits, loss, cost = (torch.zeros(1, dtype=kind) for kind in (torch.int64, torch.float64, torch.float64))
    spare = budget - sum(options[0].bits for options in kept)
    history: list[Tensor] = []
    missed = math.inf
    for options in kept:
        low = _smallest(options, lam)
        more = torch.tensor([option.bits - options[0].bits for option in options])
        loses = torch.tensor([option.loss for option in options], dtype=torch.float64)
        reduced = loses + lam * torch.tensor([float(option.bits) for option in options]).double() - low
        bits, loss, cost = (
            (have[:, None] + add).flatten()
            for have, add in ((bits, more), (loss, loses), (cost, reduced.clamp(min=0.0)))
        )
        where = _undominated(bits, loss, (bits <= spare) & (cost <= slack))
        if len(where) > states:
            ranked = torch.argsort(cost[where], stable=True)
            missed = min(missed, float(cost[where[ranked[states]]]))
            where = where[ranked[:states].sort().values]
        bits, loss, cost = bits[where], loss[where], cost[where]
        history.append(where.to(torch.int32))
        if not len(where):
            return None, missed
    return _trace(kept, history), missed


def _undominated(bits: Tensor, loss: Tensor, allowed: Tensor) -> Tensor:
    """Indices of the allowed entries that no other dominates, sorted by bits."""
    where = allowed.nonzero().flatten()
    where = where[torch.argsort(loss[where], stable=True)]
    where = where[torch.argsort(bits[where], stable=True)]
    sorted_loss = loss[where]
    before = torch.cat([sorted_loss.new_full((1,), math.inf), sorted_loss.cummin(0).values[:-1]])
    return where[sorted_loss < before[: len(where)]]


def _trace(kept: Sequence[Sequence[Option]], history: Sequence[Tensor]) -> list[int]:
    """The options that led to the last partial solution, which has the smallest loss."""
    state = len(history[-1]) - 1 if history else 0
    picked = []
    for options, where in zip(reversed(kept), reversed(history), strict=True):
        state, option = divmod(int(where[state]), len(options))
        picked.append(option)
    return picked[::-1]


def _loss(kept: Sequence[Sequence[Option]], picked: Sequence[int]) -> float:
    return math.fsum(options[number].loss for options, number in zip(kept, picked, strict=True))


def _bits(kept: Sequence[Sequence[Option]], picked: Sequence[int]) -> int:
    return sum(options[number].bits for options, number in zip(kept, picked, strict=True))


def _cost(kept: Sequence[Sequence[Option]], picked: Sequence[int]) -> tuple[float, int]:
    return _loss(kept, picked), _bits(kept, picked)
