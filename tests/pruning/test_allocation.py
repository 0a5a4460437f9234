"""How many zeros each layer gets: totals are exact, and the measured choice is the best of all."""

import itertools
import math
import random
from types import SimpleNamespace

import pytest

from attar.pruning.allocation import whole_counts
from attar.pruning.sensitivity import choose, measured_at
from attar.sensitivity.measurements import Measurement


@pytest.mark.parametrize("seed", range(8))
def test_whole_counts_sum_exactly_and_stay_near(seed):
    chance = random.Random(seed)
    linears = {str(i): SimpleNamespace(size=chance.choice([7, 64, 1000, 4097])) for i in range(12)}
    whole = sum(linear.size for linear in linears.values())
    targets = {name: chance.random() * linear.size for name, linear in linears.items()}
    near = round(sum(targets.values()))
    for total in (0, 1, near, near + 37, whole - 1, whole):
        counts = whole_counts(targets, linears, total)
        assert sum(counts.values()) == total
        assert all(0 <= count <= linears[name].size for name, count in counts.items())
    exact = whole_counts(targets, linears, near)
    assert all(abs(exact[name] - targets[name]) <= 2 for name in exact)


def measured(group, size, curve):
    return [
        Measurement(group, (group,), f"{part:g}", "zeros", size - round(size * part), size, kl, 0.0)
        for part, kl in curve.items()
    ]


def test_the_measured_choice_is_the_best_of_all_steps():
    sizes = {"a": 1000, "b": 3000, "c": 500}
    curves = {
        "a": {0.4: 0.01, 0.5: 0.02, 0.6: 0.09},
        "b": {0.4: 0.10, 0.5: 0.30, 0.6: 0.50},
        "c": {0.4: 0.001, 0.5: math.inf, 0.6: 0.004},
    }
    rows = [one for group in sizes for one in measured(group, sizes[group], curves[group])]
    chosen = choose(rows, sizes, 0.5)
    fractions = {group: float(part) for group, part in chosen.choice.items()}

    def kl(group, part):
        known = sorted(point for point, value in curves[group].items() if math.isfinite(value))
        low = max(point for point in known if point <= part + 1e-9)
        high = min(point for point in known if point >= part - 1e-9)
        share = (part - low) / (high - low) if high > low else 0.0
        return curves[group][low] ** (1 - share) * curves[group][high] ** share

    steps = [round(0.4 + 0.02 * step, 2) for step in range(11)]
    fitting = [
        sum(kl(group, part) for group, part in zip(sizes, parts, strict=True))
        for parts in itertools.product(steps, repeat=3)
        if sum(size - round(size * part) for size, part in zip(sizes.values(), parts, strict=True)) <= 2250
    ]
    assert chosen.loss == pytest.approx(min(fitting), rel=1e-9) and chosen.gap <= 1e-12
    assert fractions["b"] < 0.5 < fractions["a"]


def test_what_is_measured_surrounds_the_amount():
    assert measured_at(0.5) == [0.3, 0.4, 0.5, 0.6, 0.7]
    assert measured_at(0.9) == [0.7, 0.8, 0.9, 0.95]
    for asked in (0.01, 0.05, 0.33, 0.72, 0.99):
        parts = measured_at(asked)
        assert len(parts) >= 2 and min(parts) <= asked <= max(parts) and parts == sorted(parts)
