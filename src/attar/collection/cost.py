"""What answers cost: estimated before, counted while they come, and never above the budget.

    cost = (prompt tokens * price_in + answer tokens * price_out) / 10^6

A request is sent only when its largest possible cost (a prompt token a byte, an answer of ``max_tokens``)
fits into what the budget has left after the largest costs of the requests on their way. So the sum never
exceeds the budget, and less than one request's largest cost of it stays unused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from attar.collection.requests import TeacherRequest
from attar.collection.settings import CollectSettings, CostSettings

MILLION = 1e6
_MOST_TOKENS = 1 << 40  # a row that says more is damaged


@dataclass(frozen=True)
class CollectionEstimate:
    """What a collection will ask, before it begins.

    Attributes:
        requests: all of them, the answered ones included.
        prompt_tokens: about, of those that are open.
        answer_tokens: at most, of those that are open.
        cost: at most; None without prices.
        spent: by the answers so far.
    """

    requests: int
    answered: int
    prompt_tokens: int
    answer_tokens: int
    cost: float | None
    spent: float
    budget: float | None

    def text(self) -> str:
        """One line."""
        still = self.requests - self.answered
        line = (
            f"{self.requests:,} requests, {still:,} to ask: about {self.prompt_tokens:,} prompt tokens, "
            f"at most {self.answer_tokens:,} answer tokens"
        )
        if self.cost is not None:
            line += f", cost at most {self.cost:.2f}"
        if self.spent:
            line += f" ({self.spent:.2f} spent so far)"
        if self.budget is not None and self.spent + (self.cost or 0.0) > self.budget:
            line += f"; the budget of {self.budget:g} may end it earlier"
        return line


def estimate(
    requests: Iterable[TeacherRequest],
    answered: Callable[[str], bool],
    settings: CollectSettings,
    spent: float,
) -> CollectionEstimate:
    """The estimate of a collection.

    Args:
        answered: whether a request has its answer, by its id.
    """
    every = list(requests)
    still = [request for request in every if not answered(request.id)]
    prompt_tokens = sum(request.prompt_tokens for request in still)
    answer_tokens = len(still) * settings.answers.max_tokens
    priced = settings.cost.price_in + settings.cost.price_out
    return CollectionEstimate(
        requests=len(every),
        answered=len(every) - len(still),
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        cost=price(settings.cost, prompt_tokens, answer_tokens) if priced else None,
        spent=spent,
        budget=settings.cost.budget,
    )


def price(settings: CostSettings, prompt_tokens: int, answer_tokens: int) -> float:
    """What so many tokens cost."""
    return (prompt_tokens * settings.price_in + answer_tokens * settings.price_out) / MILLION


def row_tokens(row: Mapping[str, Any]) -> tuple[int, int]:
    """Prompt and answer tokens of a row; where the teacher did not count them, their bytes: a bound."""
    usage = row.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    *prompt, answer = row["messages"]
    counts = (usage.get(name) for name in ("prompt_tokens", "completion_tokens"))
    sizes = (
        sum(len(str(message.get("content")).encode()) for message in prompt),
        len(str(answer.get("content")).encode()),
    )
    prompt_tokens, answer_tokens = (
        count if isinstance(count, int) and 0 <= count <= _MOST_TOKENS else size
        for count, size in zip(counts, sizes, strict=True)
    )
    return prompt_tokens, answer_tokens


class Ledger:
    """Money: spent, and reserved for the requests on their way.

    Args:
        settings: prices and budget.
        spent: by earlier runs.

    Attributes:
        uncertain: of ``spent``, for answers that broke off: they may have been charged.
    """

    def __init__(self, settings: CostSettings, spent: float = 0.0) -> None:
        self.settings = settings
        self.spent = spent
        self.uncertain = 0.0
        self._reserved = 0.0
        self._changed = asyncio.Condition()

    def most(self, request: TeacherRequest, max_tokens: int) -> float:
        """The largest possible cost of a request."""
        return price(self.settings, request.most_prompt_tokens, max_tokens)

    async def reserve(self, amount: float) -> bool:
        """Reserve an amount, after others have settled if needed; False: the budget has no room for it."""
        budget = self.settings.budget
        async with self._changed:
            while budget is not None and self.spent + self._reserved + amount > budget:
                if self.spent + amount > budget:
                    return False
                await self._changed.wait()
            self._reserved += amount
        return True

    async def settle(self, reserved: float, cost: float, *, uncertain: bool = False) -> None:
        """Give a reservation back, and count what the request cost."""
        async with self._changed:
            self._reserved -= reserved
            self.spent += cost
            self.uncertain += cost if uncertain else 0.0
            self._changed.notify_all()
