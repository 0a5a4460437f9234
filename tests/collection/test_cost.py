"""Estimates, and a budget that is never exceeded."""

import asyncio
import random

import pytest

from attar.collection.cost import Ledger, estimate, price, row_tokens
from attar.collection.prompts import ChatPrompt
from attar.collection.requests import make_requests
from attar.collection.settings import CollectSettings, CostSettings
from attar.errors import SettingsError
from attar.options import nest

PRICED = CostSettings(price_in=3.0, price_out=15.0, budget=1.0)


def requests_of(*texts, **options):
    settings = nest(CollectSettings, options)
    prompts = [ChatPrompt(({"role": "user", "content": text},), "here") for text in texts]
    return make_requests(prompts, settings, "t", seeded=False), settings


def test_price_of_a_million():
    assert price(PRICED, 1_000_000, 0) == 3.0
    assert price(PRICED, 0, 2_000_000) == 30.0
    assert price(CostSettings(), 10, 10) == 0.0


def test_the_estimate_bounds_what_is_open():
    requests, settings = requests_of("a" * 400, "b" * 400, max_tokens=100, price_in=3.0, price_out=15.0)
    plan = estimate(requests, lambda id: id == requests[0].id, settings, spent=0.5)
    assert (plan.requests, plan.answered, plan.answer_tokens) == (2, 1, 100)
    assert 100 <= plan.prompt_tokens <= 116 <= requests[1].most_prompt_tokens
    assert plan.cost == pytest.approx(plan.prompt_tokens * 3e-6 + 100 * 15e-6)
    assert "1 to ask" in plan.text() and "(0.50 spent so far)" in plan.text()
    assert estimate(requests, lambda id: False, requests_of()[1], 0.0).cost is None


def test_a_prompt_has_at_most_a_token_a_byte():
    requests, _ = requests_of("größer 字 🙂")
    assert requests[0].most_prompt_tokens >= len("größer 字 🙂".encode()) + 4


@pytest.mark.parametrize("seed", range(5))
def test_the_budget_is_never_exceeded_and_almost_used_up(seed):
    """Many requests at a time; what one costs is at most what was reserved for it."""
    draw = random.Random(seed)
    ledger = Ledger(PRICED)
    largest, refused = 0.05, []

    async def request():
        most = draw.uniform(0.01, largest)
        if not await ledger.reserve(most):
            refused.append(most)
            return
        await asyncio.sleep(draw.uniform(0, 0.002))
        await ledger.settle(most, most * draw.uniform(0.2, 1.0))
        assert ledger.spent <= PRICED.budget

    async def run():
        await asyncio.gather(*(request() for _ in range(150)))

    asyncio.run(run())
    assert refused and PRICED.budget - largest < ledger.spent <= PRICED.budget


def test_answers_that_broke_off_count_as_uncertain():
    ledger = Ledger(PRICED)

    async def run():
        assert await ledger.reserve(0.6)
        await ledger.settle(0.6, 0.6, uncertain=True)
        assert not await ledger.reserve(0.6)

    asyncio.run(run())
    assert ledger.spent == ledger.uncertain == 0.6


def test_tokens_of_a_row_are_the_teachers_or_a_bound():
    messages = [{"role": "user", "content": "größer"}, {"role": "assistant", "content": "ja"}]
    usage = {"prompt_tokens": 3, "completion_tokens": 5}
    assert row_tokens({"messages": messages, "usage": usage}) == (3, 5)
    assert row_tokens({"messages": messages, "usage": None}) == (8, 2)


def test_a_budget_needs_prices():
    with pytest.raises(SettingsError, match="price-in"):
        CostSettings(budget=1.0)
    with pytest.raises(SettingsError, match="price_out"):
        CostSettings(price_out=-1.0)
    with pytest.raises(SettingsError, match="budget"):
        CostSettings(price_in=1.0, budget=float("nan"))


ODD = [None, [], "7", *({"prompt_tokens": count} for count in (10**400, "7", -1, 0.5))]


@pytest.mark.parametrize("usage", ODD)
def test_a_row_with_odd_counts_counts_by_its_bytes(usage):
    messages = [{"role": "user", "content": "abcd"}, {"role": "assistant", "content": "abc"}]
    assert row_tokens({"messages": messages, "usage": usage}) == (4, 3)
