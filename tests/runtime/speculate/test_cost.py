"""Times of a pass: lines between measured sizes, and what real steps change."""

import random

import pytest

from attar.runtime.speculate.cost import DRAFTED, LEAST, MOST, PLAIN, Cost, Curve


def test_a_curve_is_straight_between_its_knots_and_goes_on_behind_them():
    curve = Curve({1: 1.0, 4: 1.6, 8: 4.0})
    assert [curve.at(size) for size in (1, 2, 4, 6, 8, 10)] == pytest.approx([1, 1.2, 1.6, 2.8, 4, 5.2])
    assert Curve().at(3) == 0
    assert Curve({2: 1.0}).at(6) == 3.0, "one size is all that is known: in proportion"


def test_a_curve_never_falls():
    curve = Curve({1: 1.0, 2: 0.7, 4: 1.5})
    values = [curve.at(size) for size in range(1, 20)]
    assert values == sorted(values) and values[1] == 1.0


def test_real_steps_correct_a_wrong_curve():
    rng = random.Random(0)
    cost = Cost({1: {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}})
    for _ in range(1500):
        tokens = rng.choice((1, 2, 3, 5, 8))
        cost.note_target(1, tokens, (1 + 0.3 * (tokens - 1)) * rng.uniform(0.9, 1.1))
    for tokens in (1, 2, 3, 4, 5, 8):
        assert cost.target(1, tokens) == pytest.approx(1 + 0.3 * (tokens - 1), rel=0.1)


def test_a_slow_machine_is_not_taken_for_a_flat_curve():
    cost = Cost({1: {1: 1.0, 4: 1.5, 8: 2.0}, 8: {8: 2.0, 16: 3.0}})
    for _ in range(100):
        cost.note_target(1, 1, 2.0)
    assert cost.target(1, 1) == pytest.approx(2.0, rel=0.05)
    assert cost.target(1, 8) / cost.target(1, 1) > 1.5
    assert cost.target(8, 16) > 3.5, "the other batches' curves move along"


def test_steps_with_drafts_say_little_of_plain_ones():
    cost = Cost({1: {1: 1.0, 8: 2.0, 16: 4.0}})
    for _ in range(40):
        cost.note_target(1, 8, 3.0)
    assert cost.target(1, 8) == pytest.approx(3.0, rel=0.05)
    assert cost.target(1, 1) < 1.1


def test_a_hiccup_is_no_lesson():
    cost = Cost({1: {1: 1.0, 4: 1.5}})
    cost.note_target(1, 1, 50.0)
    assert cost.target(1, 1) < 1.1


def test_new_sizes_become_knots_and_not_too_many():
    cost = Cost()
    assert not cost.known and cost.target(3, 5) == 0
    for tokens in range(1, 500):
        cost.note_target(1, tokens, 1 + tokens / 100)
    assert cost.target(1, 250) == pytest.approx(3.5, rel=0.05)
    assert len(cost.table()[1]) < 40


def test_batches_between_measured_ones():
    cost = Cost({1: {1: 1.0, 8: 2.0}, 8: {8: 4.0, 16: 5.0}}, {1: 0.1, 4: 0.4})
    assert cost.target(1, 8) == 2 and cost.target(8, 8) == 4 and cost.target(64, 16) == 5
    assert cost.target(4, 8) == pytest.approx(2 + 3 / 7 * 2)
    assert cost.draft(0) == 0 and cost.draft(2) == pytest.approx(0.2)
    cost.note_draft(1, 5, 0.5)
    assert cost.draft(1) == pytest.approx(0.1)


def test_many_sizes_at_once_are_as_one_by_one() -> None:
    tables = (
        {1: {1: 1.0, 8: 2.0, 16: 4.0}, 8: {8: 4.0, 16: 5.0, 32: 9.0}},
        {1: {2: 1.0}},
        {4: {4: 1.0, 5: 1.1}},
    )
    for cost in map(Cost, tables):
        for batch in (1, 3, 8, 20):
            one_by_one = [cost.target(batch, tokens) for tokens in range(batch, batch + 60)]
            assert cost.targets(batch, batch, 60) == pytest.approx(one_by_one)


def test_only_plain_passes_set_the_times() -> None:
    cost = Cost({1: {1: 1.0, 8: 2.0}}, settle=2)
    for tokens, seconds in ((1, 0.2), (5, 9.0), (300, 50.0), (1, 0.2)):
        assert not cost.settled
        cost.note_target(1, tokens, seconds)
    assert cost.settled
    assert (cost.target(1, 1), cost.target(1, 8)) == (0.5, 1.2), "none falls below half"
    assert Cost(settle=3).settled, "nothing was measured: all is learnt"


def test_a_plain_pass_is_one_whatever_curve_its_batch_shares() -> None:
    cost = Cost({4: {4: 1.0, 8: 2.0}, 64: {64: 10.0, 128: 20.0}})
    cost.note_target(3, 3, 2.0)
    assert cost.target(64, 64) == pytest.approx(10 * 1.5 ** PLAIN[0])
    cost.note_target(3, 5, 1e-9)
    assert cost.target(64, 64) == pytest.approx(10 * 1.5 ** PLAIN[0] * LEAST ** DRAFTED[0])


def test_what_a_pass_cost_in_plain_ones() -> None:
    cost = Cost({1: {1: 2.0, 5: 4.0, 101: 52.0}})
    assert cost.passes(1, 5, 5.0) == 2.5 and cost.passes(1, 5, 1.0) == 0.5
    assert cost.passes(1, 5, 900.0) == MOST * 2, "a hiccup is no draft's fault"
    assert cost.passes(1, 105, 900.0, beside=100) == pytest.approx(2.0), (
        "as the curve says: 4 tokens more, 1 pass"
    )
