"""Integers of a range and no others, against counting."""

from __future__ import annotations

import random
import re

import pytest

from attar.runtime.sampling.integer_regex import integer_regex

EDGES = [None, -1001, -1000, -120, -99, -10, -9, -1, 0, 1, 7, 9, 10, 11, 99, 100, 123, 999, 1000, 1001]


@pytest.mark.few(8)
@pytest.mark.parametrize("low", EDGES)
def test_every_integer_of_a_small_range(low: int | None) -> None:
    for high in EDGES:
        if low is not None and high is not None and low > high:
            with pytest.raises(ValueError, match="no integer"):
                integer_regex(low, high)
            continue
        pattern = re.compile(integer_regex(low, high))
        for number in range(-1105, 1105):
            inside = (low is None or number >= low) and (high is None or number <= high)
            assert bool(pattern.fullmatch(str(number))) == inside, (low, high, number)
        assert not any(pattern.fullmatch(text) for text in ("", "-0", "00", "01", "-", "1.0", "+1"))


@pytest.mark.parametrize("seed", range(20))
def test_the_edges_of_large_ranges(seed: int) -> None:
    draws = random.Random(seed)
    low, high = sorted(
        draws.randint(-(10 ** draws.randint(1, 40)), 10 ** draws.randint(1, 40)) for _ in range(2)
    )
    pattern = re.compile(integer_regex(low, high))
    for number in (low, high, low + 1, high - 1, draws.randint(low, high)):
        assert bool(pattern.fullmatch(str(number))) == (low <= number <= high)
    for number in (low - 1, high + 1, low * 10 - 7, high * 10 + 7):
        assert bool(pattern.fullmatch(str(number))) == (low <= number <= high)
    assert len(integer_regex(-(2**63), 2**63 - 1)) < 2500
