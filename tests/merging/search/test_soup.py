"""Greedy soup against the definition, both rules; the cache keeps what was measured."""

from __future__ import annotations

import itertools
import json
import math
import random

import pytest

from attar.errors import NumericsError
from attar.merging.search.loss_cache import LossCache
from attar.merging.search.soup import greedy_soup


def by_hand(losses, table, strict):
    order = sorted(range(len(losses)), key=lambda n: losses[n])
    soup, best = [order[0]], losses[order[0]]
    for number in order[1:]:
        loss = table[tuple(sorted([*soup, number]))]
        if loss < best or (loss == best and not strict):
            soup, best = [*soup, number], loss
    return tuple(sorted(soup)), best


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_as_defined(seed, strict):
    noise = random.Random(seed)
    count = noise.randint(1, 5)
    table = {
        chosen: noise.choice([1.0, 1.1, 1.2, 1.3])
        for size in range(1, count + 1)
        for chosen in itertools.combinations(range(count), size)
    }
    losses = [table[number,] for number in range(count)]
    asked = []

    def attempt(chosen):
        asked.append(chosen)
        return table[chosen]

    soup = greedy_soup(losses, attempt, strict=strict)
    assert (soup.kept, soup.loss) == by_hand(losses, table, strict)
    assert len(asked) == len(set(asked)) == count - 1
    assert soup.loss <= min(losses), "never worse than its best ingredient"
    assert [trial.alone for trial in soup.trials] == sorted(losses)
    assert tuple(sorted(trial.ingredient for trial in soup.trials if trial.kept)) == soup.kept


def test_an_equal_ingredient_is_kept_by_the_paper_and_not_by_the_code():
    assert greedy_soup([1.0, 1.0], lambda chosen: 1.0, strict=False).kept == (0, 1)
    assert greedy_soup([1.0, 1.0], lambda chosen: 1.0, strict=True).kept == (0,)


def test_broken_ingredients_are_tried_last_and_never_kept():
    soup = greedy_soup([math.nan, 2.0, math.inf, 1.0], lambda chosen: math.nan, strict=False)
    assert [trial.ingredient for trial in soup.trials] == [3, 1, 0, 2] and soup.kept == (3,)
    rows = soup.report(["a", "b", "c", "d"])
    assert rows[0] == {"model": "d", "loss": 1.0, "loss_with": 1.0, "kept": True}
    json.dumps(rows[:1], allow_nan=False)
    with pytest.raises(NumericsError, match="no ingredient of the soup has a finite loss"):
        greedy_soup([math.nan, math.inf], lambda chosen: 0.0, strict=False)


def test_report_is_json_whatever_the_losses():
    soup = greedy_soup([1.0, math.nan], lambda chosen: math.nan, strict=False)
    assert json.loads(json.dumps(soup.report(["a", "b"]), allow_nan=False))[1]["loss_with"] is None


def test_the_cache_measures_once_and_survives_a_cut_line(tmp_path):
    path = tmp_path / "losses.jsonl"
    asked = []

    def measure(value):
        asked.append(value)
        return value

    cache = LossCache(path)
    assert [cache.loss((1, 2), lambda: measure(0.25)), cache.loss((1, 2), lambda: measure(9.0))] == [0.25] * 2
    assert cache.loss((3,), lambda: measure(math.nan)) == math.inf
    with path.open("a") as file:
        file.write('{"tried": [4], "lo')
    again = LossCache(path)
    assert again.loss((1, 2), lambda: measure(8.0)) == 0.25
    assert again.loss((3,), lambda: measure(8.0)) == math.inf
    assert again.loss((4,), lambda: measure(0.5)) == 0.5
    assert len(asked) == 3
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [
        {"tried": [1, 2], "loss": 0.25},
        {"tried": [3], "loss": None},
        {"tried": [4], "loss": 0.5},
    ]
