"""The profiler's arithmetic, against sums over outcomes and draws."""

from __future__ import annotations

import math
import random

import pytest

from attar.measure.speculation.metrics import AcceptanceCounts, expected_tokens, speedup


@pytest.mark.parametrize(("chance", "drafts"), [(0.0, 3), (0.3, 1), (0.8, 4), (0.8, 0), (1.0, 5)])
def test_expected_tokens_are_the_mean_over_outcomes(chance: float, drafts: int) -> None:
    outcomes = [chance**n * (1 - chance) for n in range(drafts)] + [chance**drafts]
    assert sum(outcomes) == pytest.approx(1)
    assert expected_tokens(chance, drafts) == pytest.approx(sum((n + 1) * p for n, p in enumerate(outcomes)))


def test_figures_of_passes_counted_by_hand() -> None:
    passes = AcceptanceCounts()
    for drafted, depth, accepted in [(0, 0, 0), (4, 4, 4), (4, 4, 1), (6, 2, 0)]:
        passes.note(drafted, depth, accepted)
    assert (passes.total, passes.drafted, passes.accepted) == (4, 14, 5)
    assert passes.rate == 5 / 14
    assert passes.chance == 5 / (5 + 2)  # two passes stopped before their depth
    assert passes.tokens_per_pass == 9 / 4
    a = 5 / 7
    assert passes.theory == pytest.approx((1 + 2 * expected_tokens(a, 4) + expected_tokens(a, 2)) / 4)
    assert passes.histogram == (1, 1, 0, 0, 1)  # the pass without drafts is not in it


def test_nothing_drafted_has_no_rate() -> None:
    passes = AcceptanceCounts()
    assert passes.tokens_per_pass is None and passes.theory is None
    passes.note(0, 0, 0)
    assert (passes.rate, passes.chance, passes.tokens_per_pass, passes.theory) == (None, None, 1.0, 1.0)
    assert passes.histogram == ()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(AssertionError, match="5 accepted"):
        AcceptanceCounts().note(8, 4, 5)


def test_theory_is_met_where_acceptance_is_the_same_everywhere() -> None:
    draws, passes = random.Random(0), AcceptanceCounts()
    for _ in range(20000):
        depth, accepted = draws.choice((0, 1, 3, 6)), 0
        while accepted < depth and draws.random() < 0.7:
            accepted += 1
        passes.note(depth, depth, accepted)
    assert passes.chance == pytest.approx(0.7, abs=0.01)
    assert passes.theory == pytest.approx(passes.tokens_per_pass, rel=0.01)


def test_speedup_of_pairs() -> None:
    ratio = speedup([2.0, 4.0], [1.0, 1.0])
    assert ratio.value == pytest.approx(math.sqrt(8)) and ratio.pairs == 2
    # half of log 2 apart: standard error log(2) / 2, one degree of freedom
    assert ratio.high / ratio.value == pytest.approx(math.exp(12.706 * math.log(2) / 2))
    assert ratio.low * ratio.high == pytest.approx(ratio.value**2)
    one = speedup([3.0], [1.5])
    assert one.value == one.low == one.high == pytest.approx(2)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    draws, held = random.Random(1), 0
    for _ in range(2000):
        logs = [draws.gauss(0.5, 0.2) for _ in range(5)]
        ratio = speedup([math.exp(log) for log in logs], [1.0] * 5)
        held += ratio.low <= math.exp(0.5) <= ratio.high
    assert 0.935 < held / 2000 < 0.965


def test_theory_is_above_where_acceptances_come_together_and_below_where_the_first_is_surest() -> None:
    together, surest = AcceptanceCounts(), AcceptanceCounts()
    together.note(8, 8, 8)
    together.note(8, 8, 0)
    surest.note(2, 2, 1)
    assert together.theory is not None and together.theory > (together.tokens_per_pass or 0)
    assert surest.theory is not None and surest.theory < (surest.tokens_per_pass or 0)
