"""The workers: each takes the next request and sends it until it is answered, refused or given up.

Requests are taken in order, so the answers in the journal are always those of the first requests and a few
later ones. A run ends early for one reason: a failure that every request would meet, the budget, too many
failures in a row, or a signal. What is on its way then is still waited for, since it is paid for.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from attar.collection.cost import Ledger, price, row_tokens
from attar.collection.journal import Journal
from attar.collection.limits import RateLimits
from attar.collection.requests import TeacherRequest
from attar.collection.retry import CircuitBreaker, TeacherFailure, backoff
from attar.collection.settings import CollectSettings
from attar.collection.teachers import Teacher, TeacherAnswer
from attar.errors import AttarError, EndpointError
from attar.progress import ProgressTask


@dataclass
class RunTally:
    """What became of the requests of this run.

    Attributes:
        refused: requests that can have no answer, with the reason.
        given_up: requests that had none after all attempts.
    """

    answered: int = 0
    sent: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    refused: list[tuple[TeacherRequest, str]] = field(default_factory=list)
    given_up: list[tuple[TeacherRequest, str]] = field(default_factory=list)


class Crew:
    """Workers that share limits, budget, circuit breaker and journal.

    Args:
        task: progress; a step is a request.

    Attributes:
        reason: why the run ended before all requests were asked; None: it did not.
    """

    def __init__(
        self, teacher: Teacher, settings: CollectSettings, journal: Journal, spent: float, task: ProgressTask
    ) -> None:
        self.tally = RunTally()
        self.ledger = Ledger(settings.cost, spent)
        self._teacher, self._settings, self._journal, self._task = teacher, settings, journal, task
        endpoint = settings.endpoint
        self._limits = RateLimits(endpoint.requests_per_minute, endpoint.tokens_per_minute, self._sleep)
        self._circuit = CircuitBreaker(endpoint.most_failures)
        self._draw = random.Random()  # jitter, which no result depends on
        self._stopping = asyncio.Event()
        self._last_answer = time.monotonic()
        self.reason: BaseException | None = None

    def stop(self, reason: BaseException) -> bool:
        """Send no further request; the first reason counts. False: it was stopped already."""
        if self._stopping.is_set():
            return False
        self.reason = reason
        self._stopping.set()
        return True

    async def run(self, requests: Sequence[TeacherRequest]) -> None:
        """Ask all requests; ``reason`` says why it ended early, if it did."""
        remaining = iter(requests)
        workers = [
            self._work(remaining) for _ in range(min(self._settings.endpoint.concurrency, len(requests)))
        ]
        await asyncio.gather(*workers)

    async def _work(self, remaining: Iterator[TeacherRequest]) -> None:
        for request in remaining:
            if self._stopping.is_set():
                return
            try:
                await self._serve(request)
            except AttarError as error:
                self.stop(error)

    async def _serve(self, request: TeacherRequest) -> None:
        """Send a request until it is answered, refused or given up."""
        failures = limited = 0
        while True:
            reply = await self._send(request)
            if reply is None:
                return
            if isinstance(reply, TeacherAnswer):
                self._circuit.succeed()
                self._last_answer = time.monotonic()
                return
            limited += reply.limited
            failures += not reply.limited
            if self._ends(request, reply, failures):
                return
            if await self._sleep((reply.retry_after or 0.0) + backoff(failures + limited, self._draw)):
                return

    async def _send(self, request: TeacherRequest) -> TeacherAnswer | TeacherFailure | None:
        """One try, within budget and limits; None: the run is being stopped."""
        most_tokens = self._settings.answers.max_tokens
        most = self.ledger.most(request, most_tokens)
        expected = request.prompt_tokens + most_tokens
        if not await self.ledger.reserve(most):
            self.stop(_budget_reached(self.ledger))
            return None
        cost, uncertain = 0.0, False
        try:
            if not await self._limits.acquire(expected) or self._stopping.is_set():
                return None
            self.tally.sent += 1
            reply = await self._teacher.ask(request)
            if isinstance(reply, TeacherAnswer):
                row = answer_row(request, reply, self._teacher.name)
                self._journal.append(row)  # first: it is paid for
                tokens = row_tokens(row)
                cost, uncertain = price(self._settings.cost, *tokens), not row["usage"]
                self._limits.settle(expected, sum(tokens))
                self._count(*tokens)
            elif reply.charged:
                cost, uncertain = most, True
            return reply
        finally:
            await self.ledger.settle(most, cost, uncertain=uncertain)

    def _count(self, prompt_tokens: int, answer_tokens: int) -> None:
        self.tally.answered += 1
        self.tally.prompt_tokens += prompt_tokens
        self.tally.answer_tokens += answer_tokens
        numbers = {"k tokens": (self.tally.prompt_tokens + self.tally.answer_tokens) / 1000}
        if self._settings.cost.price_in + self._settings.cost.price_out:
            numbers["cost"] = self.ledger.spent
        self._task.advance(1, **numbers)

    def _ends(self, request: TeacherRequest, failure: TeacherFailure, failures: int) -> bool:
        """Whether a failure ends its request, or the run; if not, it may ask all workers to wait."""
        endpoint = self._settings.endpoint
        if failure.effect == "stop":
            self.stop(EndpointError(f"{self._teacher.name}: {failure.message}", hint=failure.hint))
            return True
        if not failure.limited and self._circuit.fail():
            self.stop(
                EndpointError(
                    f"{self._teacher.name}: {self._circuit.failures} failures in a row, the last of them: "
                    f"{failure.message}",
                    hint="nothing that was answered is lost: run the same command again",
                )
            )
            return True
        if failure.effect == "refuse":
            self.tally.refused.append((request, failure.message))
            self._task.advance()
            return True
        if failures == endpoint.attempts:
            self.tally.given_up.append((request, failure.message))
            return True
        retry_after = failure.retry_after or 0.0
        waited = time.monotonic() - self._last_answer if failure.limited else 0.0
        if max(retry_after, waited) > endpoint.longest_wait_s:
            hint = "run the same command again later, or allow it with --longest-wait-s"
            waits = (
                f"asks to wait {retry_after:.0f} s"
                if retry_after > waited
                else f"answers nothing for {waited:.0f} s"
            )
            self.stop(EndpointError(f"{self._teacher.name} {waits}: {failure.message}", hint=hint))
            return True
        if retry_after:
            self._limits.pause(retry_after)
        return False

    async def _sleep(self, seconds: float) -> bool:
        """Wait; true: the run is being stopped."""
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return False
        return True


def answer_row(request: TeacherRequest, answer: TeacherAnswer, teacher: str) -> dict[str, Any]:
    """The line of an answer, in the journal and in the data."""
    message = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    counts = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
    return {
        "messages": [*(answer.messages or request.messages), message],
        "id": request.id,
        "teacher": teacher,
        "usage": counts if None not in counts.values() else None,
        "finish_reason": answer.finish_reason,
        "created": answer.created,
    }


def _budget_reached(ledger: Ledger) -> EndpointError:
    return EndpointError(
        f"the budget of {ledger.settings.budget:g} has no room for another request: {ledger.spent:.4g} spent",
        hint="the answers are kept: run it again with a larger --budget, or with --offline for what there is",
    )
