"""Which texts a draft model should read, and what is charged for it."""

import pytest

from attar.runtime.speculate.draft import kind_of
from attar.runtime.speculate.draft_prefill import CATCH_UP, DraftPrefill
from attar.runtime.speculate.latency import Latency
from attar.runtime.speculate.loss_budget import BUDGET
from attar.runtime.speculate.policy import DraftPolicy


def drafting(reading: float = 0.1, a: float | None = None) -> DraftPolicy:
    """Plain passes take 1; at a = 1 and K = 4 drafts, 5 tokens take 1.2 + 4 * 0.05."""
    policy = DraftPolicy(Latency({1: 1.0, 5: 1.2}, {1: 0.05}, reading=reading), most=4)
    if a is not None:
        for level in range(1, 5):
            for number in range(400):
                policy.acceptance.note(9, kind_of(0, level), number % 10 < 10 * a)
    return policy


@pytest.mark.parametrize(
    ("a", "tokens", "remaining", "worth"),
    [
        (1.0, 600, 100, True),  # 60 passes to read, some 70 of 100 saved
        (1.0, 900, 100, False),
        (1.0, 900, 1000, True),
        (0.0, 600, 1000, False),  # nothing is ever accepted
        (0.0, 40, 1000, True),  # the budget has 4 passes, and one more
        (0.0, 41, 1000, False),
        (None, 200, 200, True),  # nothing is known: 20 passes for some hope
        (1.0, 900, 0, False),
    ],
)
def test_a_text_is_read_where_drafts_gain_more_than_that(a, tokens, remaining, worth):
    assert DraftPrefill().pays(drafting(a=a), 0, 4, tokens, remaining) is worth


def test_what_was_read_is_not_read_again():
    reading, policy = DraftPrefill(), drafting(a=0.0)
    assert not reading.pays(policy, 0, 4, 600, 1000)
    assert reading.begin([0, 1], [4, 0], [600, 600]), "the second was not asked"
    assert reading.pays(policy, 0, 4, 600 + CATCH_UP, 1000) and not reading.pays(policy, 1, 4, 600, 1000)
    assert not reading.begin([0], [4], [600 + CATCH_UP])
    assert reading.begin([0], [4], [601 + 2 * CATCH_UP]), "it grew while nobody asked"
    reading.forget(0)
    reading.forget(7)
    assert not reading.pays(policy, 0, 4, 601 + 2 * CATCH_UP, 1000)


def test_who_may_have_no_drafts_and_who_knows_no_times_is_let_through():
    assert DraftPrefill().pays(drafting(a=0.0), 0, 0, 10_000, 10)
    assert DraftPrefill().pays(DraftPolicy(Latency()), 0, 4, 10_000, 10)


def test_where_nothing_would_be_left_to_draft_with_nothing_is_read():
    policy = drafting(a=1.0)
    policy.budget.left = BUDGET / 2 + 0.9
    assert not DraftPrefill().pays(policy, 0, 4, 600, 1000)
    policy.budget.left = BUDGET / 2 + 1.0
    assert DraftPrefill().pays(policy, 0, 4, 600, 1000)


def test_half_a_budget_at_most_is_charged():
    reading, policy = DraftPrefill(), drafting()
    reading.charge(policy, 1, 0.5)
    assert policy.budget.left == BUDGET - 0.5
    reading.charge(policy, 1, 100.0)
    assert policy.budget.left == BUDGET / 2 - 0.5 and policy.open
    reading.charge(policy, 1, 100.0)
    assert not policy.open
