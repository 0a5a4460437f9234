"""Predicted quality, and the plans within a budget, against brute force."""

import itertools
import math
import random

import pytest
import torch

from attar.models.surgery.plan_costs import PlanGrid, PlanSizes
from attar.models.surgery.plan_space import steps
from attar.pruning.planning.plans import (
    QualityCurve,
    are_distinct,
    plans_within,
    predicted_kl,
    shortlist,
)

FULL = PlanSizes(4, 96, 64, 6)
GRID = PlanGrid((1, 2, 3, 4), (24, 48, 72, 96), (32, 64), (2, 3, 4, 5, 6))
CURVES = {
    "heads": QualityCurve(((1, 0.9), (2, 0.3), (4, 0.0))),
    "neurons": QualityCurve(((24, 2.0), (72, 0.1), (96, 0.0))),
    "hidden": QualityCurve(((32, 1.5), (64, 0.0))),
    "layers": QualityCurve(((2, 3.0), (4, 0.5), (6, 0.0))),
}


def brute_kl(plan):
    return sum(CURVES[name](units) for name, units in plan._asdict().items())


def brute_cost(plan):
    return plan.layers * (plan.heads * 7 + plan.neurons * 3) * plan.hidden + 100 * plan.hidden


def cost_table(grid):
    plans = itertools.product(*grid)
    return (
        torch.tensor([float(brute_cost(PlanSizes(*plan))) for plan in plans])
        .double()
        .reshape([len(values) for values in grid])
    )


def within(budget):
    return lambda grid: plans_within(predicted_kl(CURVES, grid), cost_table(grid), budget, grid)


def test_a_curve_is_exact_at_its_points_and_rises_between_them():
    curve = CURVES["neurons"]
    assert [curve(units) for units in (24, 72, 96)] == [2.0, 0.1, 0.0]
    between = [curve(units) for units in range(24, 97)]
    assert between == sorted(between, reverse=True)
    assert math.isclose(curve(84), 0.25 * 0.1)  # half way in sqrt(KL)


def test_the_prediction_is_the_sum_over_the_structures():
    table = predicted_kl(CURVES, GRID).flatten()
    for flat in range(len(table)):
        assert math.isclose(float(table[flat]), brute_kl(GRID.plan(flat)), rel_tol=1e-12)


@pytest.mark.parametrize("budget", [20_000, 55_000, 90_000, 1e9])
def test_the_plans_within_a_budget_are_those_of_brute_force(budget):
    plans = [PlanSizes(*plan) for plan in itertools.product(*GRID)]
    inside = sorted(
        (plan for plan in plans if brute_cost(plan) <= budget),
        key=lambda plan: (brute_kl(plan), brute_cost(plan)),
    )
    ranked = list(within(budget)(GRID))
    assert sorted(ranked) == sorted(inside) and ranked[0] == inside[0]
    assert [brute_kl(plan) for plan in ranked] == sorted(brute_kl(plan) for plan in inside)


def test_nothing_is_within_a_budget_below_the_smallest_plan():
    assert list(within(10)(GRID)) == []


def test_the_shortlist_has_the_best_plans_and_every_single_structure():
    budget = 0.5 * brute_cost(FULL)
    grid = GRID._replace(neurons=tuple(range(24, 97, 2)))  # neighbours are nearly the same plan
    plans = shortlist(within(budget), lambda plan: True, grid, FULL, 4)
    best = next(within(budget)(grid))
    assert plans[0] == best and len(plans) == len(set(plans))
    for first, second in itertools.combinations(plans[:4], 2):
        assert are_distinct(first, second, FULL)
    for axis, name in enumerate(PlanSizes._fields):
        alone = [FULL._replace(**{name: units}) for units in grid[axis]]
        fitting = [plan for plan in alone if brute_cost(plan) <= budget]
        if fitting:
            assert min(fitting, key=brute_kl) in plans, name


def test_refused_plans_are_passed_over():
    budget = 0.5 * brute_cost(FULL)
    best = next(within(budget)(GRID))
    plans = shortlist(within(budget), lambda plan: plan != best, GRID, FULL, 4)
    assert best not in plans and plans[0] == list(within(budget)(GRID))[1]


def test_steps_are_multiples_within_their_range():
    draws = random.Random(0)
    for _ in range(200):
        full, most = draws.randint(1, 4096), draws.randint(2, 12)
        multiple = draws.choice([1, 2, 16, 64])
        least = draws.randint(1, full)
        amounts = steps(full, multiple, least, most)
        assert amounts[-1] == full and list(amounts) == sorted(set(amounts)) and len(amounts) <= most + 1
        assert all(least <= amount and amount % multiple == 0 for amount in amounts[:-1])
