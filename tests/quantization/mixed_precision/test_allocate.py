"""Allocation against brute force over every choice, and against a table over the budget that shares no code
with it."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attar.errors import NumericsError, SettingsError
from attar.quantization.mixed_precision.allocate import Option, allocate, frontier
from attar.quantization.mixed_precision.search import with_losses


def brute_force(groups, budget):
    """Smallest loss of every choice within the budget; None where there is none."""
    fitting = [
        math.fsum(option.loss for option in picked)
        for picked in itertools.product(*groups.values())
        if sum(option.bits for option in picked) <= budget
    ]
    return min(fitting) if fitting else None


def by_table(groups, budget):
    """The textbook table: best[b] is the smallest loss with exactly b bits used at most."""
    best = [0.0] * (budget + 1)
    for options in groups.values():
        best = [
            min(
                (best[b - option.bits] + option.loss for option in options if option.bits <= b),
                default=math.inf,
            )
            for b in range(budget + 1)
        ]
    return best[budget]


def random_groups(count, seed, largest=12, options=6):
    """Groups shaped as measured ones are: loss falls about fourfold with each bit, sizes differ."""
    rng = random.Random(seed)
    groups = {}
    for number in range(count):
        size, weight = rng.randint(1, largest), rng.lognormvariate(0, 1.5)
        groups[f"g{number}"] = [
            Option(f"W{b}", b * size + rng.randint(0, 1), weight * 4.0**-b * rng.uniform(0.7, 1.4))
            for b in range(2, 2 + options)
        ]
    return groups


option_lists = st.lists(
    st.tuples(st.integers(1, 20), st.floats(0, 5, allow_nan=False)), min_size=1, max_size=4
)
small_cases = st.lists(option_lists, min_size=1, max_size=5).map(
    lambda lists: {
        f"g{i}": [Option(f"o{j}", bits, loss) for j, (bits, loss) in enumerate(options)]
        for i, options in enumerate(lists)
    }
)


@given(small_cases, st.integers(1, 100))
@settings(max_examples=100, deadline=None)
def test_equals_brute_force(groups, budget):
    best = brute_force(groups, budget)
    if best is None:
        with pytest.raises(SettingsError, match=str(sum(min(o.bits for o in g) for g in groups.values()))):
            allocate(groups, budget)
        return
    allocation = allocate(groups, budget)
    chosen = [next(o for o in groups[g] if o.name == name) for g, name in allocation.choice.items()]
    assert allocation.loss == pytest.approx(best, abs=1e-12)
    assert allocation.loss == pytest.approx(math.fsum(option.loss for option in chosen), abs=1e-12)
    assert allocation.bits == sum(option.bits for option in chosen) <= budget
    assert allocation.gap <= 1e-9
    assert list(allocation.choice) == list(groups)


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(6))
def test_equals_the_table_on_forty_groups(seed):
    groups = random_groups(40, seed)
    least, most = (sum(pick(o.bits for o in g) for g in groups.values()) for pick in (min, max))
    for share in (0.05, 0.3, 0.6):
        budget = int(least + share * (most - least))
        allocation = allocate(groups, budget)
        assert allocation.loss == pytest.approx(by_table(groups, budget), rel=1e-12)
        assert allocation.gap == 0.0 and allocation.bits <= budget


@given(small_cases, st.integers(0, 60), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_the_gap_is_a_certificate_even_with_hardly_any_states(groups, extra, states):
    budget = sum(min(o.bits for o in g) for g in groups.values()) + extra
    allocation = allocate(groups, budget, states=states)
    best = brute_force(groups, budget)
    assert allocation.loss - allocation.gap - 1e-9 <= best <= allocation.loss + 1e-9


def test_a_gap_above_zero_is_reported_when_the_states_run_out():
    groups = random_groups(60, 3)
    results = [allocate(groups, 1500, states=1), allocate(groups, 1500)]
    assert results[0].gap > 0.0 == results[1].gap
    assert results[0].loss - results[0].gap <= results[1].loss <= results[0].loss


@pytest.mark.slow
def test_more_budget_is_never_worse():
    groups = random_groups(25, 11)
    least = sum(min(o.bits for o in g) for g in groups.values())
    losses = [allocate(groups, least + 7 * i).loss for i in range(60)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]


def test_a_model_of_real_size_is_solved_exactly():
    """80 blocks of 4 groups with sizes of a 70 B model: budgets of 3e11 bits, where no table would fit."""
    rng = random.Random(5)
    sizes = {"qkv": 8192 * 10240, "o": 8192 * 8192, "gate_up": 8192 * 57344, "down": 28672 * 8192}
    groups = {
        f"{block}.{kind}": [
            Option(f"W{b}", int(size * (b + 0.125)), rng.lognormvariate(-5, 1) * 4.0**-b)
            for b in (2, 3, 4, 5, 6, 8)
        ]
        for block in range(80)
        for kind, size in sizes.items()
    }
    budget = int(4.25 * 80 * sum(sizes.values()))
    allocation = allocate(groups, budget)
    assert allocation.bits <= budget
    assert allocation.gap <= 1e-6 * allocation.loss
    uniform = math.fsum(options[2].loss for options in groups.values())
    assert allocation.loss < uniform


def test_the_frontier_is_convex_and_each_point_is_the_optimum_of_its_size():
    groups = random_groups(12, 2)
    points = frontier(groups)
    slopes = [(a.loss - b.loss) / (b.bits - a.bits) for a, b in itertools.pairwise(points)]
    assert points[0].bits == sum(min(o.bits for o in g) for g in groups.values())
    assert points[-1].loss == pytest.approx(math.fsum(min(o.loss for o in g) for g in groups.values()))
    assert all(first >= second - 1e-15 > 0 for first, second in itertools.pairwise(slopes))
    for point in points:
        assert by_table(groups, point.bits) == pytest.approx(point.loss, rel=1e-9)


def test_equal_losses_take_fewer_bits():
    groups = {"a": [Option("big", 9, 1.0), Option("small", 5, 1.0)], "b": [Option("only", 3, 0.0)]}
    assert allocate(groups, 100).choice == {"a": "small", "b": "only"}


def test_no_option_and_a_loss_that_is_no_number_are_refused():
    with pytest.raises(SettingsError, match="'b'"):
        allocate({"a": [Option("x", 1, 0.0)], "b": []}, 10)
    with pytest.raises(NumericsError, match="a: the loss of x is nan"):
        allocate({"a": [Option("x", 1, math.nan)]}, 10)


def test_no_groups_cost_nothing():
    assert allocate({}, 0).choice == {}


def test_a_group_that_the_text_never_reached_costs_what_others_do():
    def options(*losses):
        return [Option(f"W{bits}", bits * 100, loss) for bits, loss in zip((2, 4, 8), losses, strict=True)]

    groups = {"a": options(0.9, 0.1, 0.01), "dead": options(0, 0, 0), "b": options(0.5, 0.3, 0.03)}
    groups["c"] = options(0.7, 0.2, 0.0)
    losses = {name: [one.loss for one in row] for name, row in with_losses(groups).items()}
    assert losses["dead"] == [0.7, 0.2, 0.01]
    assert all(losses[name] == [one.loss for one in groups[name]] for name in "abc")
    assert allocate(with_losses(groups), 1600).choice["dead"] != "W2"
    silent = {"a": options(0, 0, 0)}
    assert with_losses(silent) == silent
