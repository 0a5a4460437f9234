"""Shares of a step: debts are paid, nobody pays for another, and what is not used is not saved."""

from __future__ import annotations

import pytest

from attar.runtime.sampling.mask_budget import STEP_S, MaskBudget


def masks(budget: MaskBudget, payer: str, cost: float, most: int = 100) -> int:
    """How many masks of a cost a payer computes now."""
    count = 0
    while budget.open(payer) and count < most:
        budget.charge(payer, cost)
        count += 1
    return count


@pytest.mark.parametrize("cost", [STEP_S / 20, STEP_S * 0.3, STEP_S, STEP_S * 7.5])
@pytest.mark.parametrize("payers", ["a", "ab", "abcd"])
def test_over_many_steps_a_payer_has_its_share(cost: float, payers: str) -> None:
    budget, spent, steps = MaskBudget(), dict.fromkeys(payers, 0.0), 400
    for _ in range(steps):
        budget.begin(payers, 0.0)
        for payer in payers:
            spent[payer] += cost * masks(budget, payer, cost)
    share = steps * STEP_S / len(payers)
    assert all(share - cost <= seconds <= share + 2 * cost for seconds in spent.values())


def test_nobody_pays_for_another() -> None:
    budget = MaskBudget()
    for _ in range(50):
        budget.begin(["attacker"] * 63 + ["other"], 0.0)
        masks(budget, "attacker", 0.015)
        assert masks(budget, "other", 0.0001, most=5) == 5


def test_a_long_pass_gives_more_and_a_rest_nothing() -> None:
    budget = MaskBudget()
    for _ in range(10):
        budget.begin(["a"], 0.1)
    assert masks(budget, "a", 0.01) == 11  # with the last of them it goes below 0
    budget.begin(["b"], 0.1)
    budget.begin(["a", "b"], 0.0)
    assert masks(budget, "a", STEP_S) == 1
