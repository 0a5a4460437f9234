"""Which sequences a draft model should prefill, and what is charged for it."""

import pytest

from attar.runtime.speculate.draft import Draft, kind_of
from attar.runtime.speculate.latency import Latency
from attar.runtime.speculate.loss_budget import BUDGET
from attar.runtime.speculate.policy import DraftPolicy
from attar.runtime.speculate.proposer import DraftFeedback


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
def test_a_prefill_pays_where_drafts_gain_more_than_that(a, tokens, remaining, worth):
    assert drafting(a=a).prefill_pays(0, 4, tokens, remaining) is worth


def test_without_known_times_every_sequence_is_prefilled():
    assert DraftPolicy(Latency()).prefill_pays(0, 4, 10_000, 10)


def test_where_nothing_would_be_left_to_draft_with_nothing_is_prefilled():
    policy = drafting(a=1.0)
    policy.budget.left = BUDGET / 2 + 0.9
    assert not policy.prefill_pays(0, 4, 600, 1000)
    policy.budget.left = BUDGET / 2 + 1.0
    assert policy.prefill_pays(0, 4, 600, 1000)


def test_half_a_budget_at_most_is_charged():
    policy, step = drafting(), drafting().latency.draft(1)
    for seconds, left in ((0.5, BUDGET - 0.5), (100.0, BUDGET / 2 - 0.5)):
        policy.note([DraftFeedback(0, Draft.chain([7]), (), [7])], 1.0, seconds, steps=1, prefilled=True)
        assert policy.budget.left == pytest.approx(left, abs=0.2) and policy.open
    policy.note([DraftFeedback(0, None, (), [7])], 1.0, 100.0, prefilled=True)
    assert not policy.open and policy.latency.draft(1) == step, "a prefill is no step"
