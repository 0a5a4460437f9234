"""The events of one HTTP request, from one or several prompts, until they end or the client is gone.

    submit(prompt) ...  →  events(): what came, nothing after a silence  →  close(): the rest is cancelled

Choice = place of the prompt x n + sample. One mailbox takes the events of all prompts and the news that the
client has gone, so there is one place where a request waits and one where it is given up. Events are counted
and timed when they come, not when a slow client reads them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import ExitStack
from typing import Any

from attar.errors import DataError, UsageError
from attar.runtime.results import Event
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.server.access_log import log_errors
from attar.runtime.server.admission_control import AdmissionControl
from attar.runtime.server.api_keys import ApiKey
from attar.runtime.server.backend import Backend
from attar.runtime.server.errors import ApiError, api_error
from attar.runtime.server.metrics import Metrics, PromptMetrics
from attar.runtime.server.middleware import ASGIReceive


class ClientDisconnectedError(Exception):
    """The client has hung up: nobody waits for an answer."""


class RequestHandler:
    """What one HTTP request runs.

    Args:
        backend: the engine.
        gate: counts the request until it is closed.
        metrics: are told of every event.
        receive: of ASGI; tells when the client hangs up.
        id: the request's name.
        params: of all its prompts.
        caller: whose request it is.
        texts: of all its prompts.
        start: when it came, on ``time.monotonic``.
        facts: what the log says about the request; written to.
    """

    def __init__(
        self,
        backend: Backend,
        gate: AdmissionControl,
        metrics: Metrics,
        receive: ASGIReceive,
        *,
        id: str,
        params: SamplingParams,
        caller: ApiKey,
        texts: int,
        start: float,
        facts: dict[str, Any],
    ) -> None:
        self.id, self.params = id, params
        self.created = int(time.time())  # the same in every chunk
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0
        self._backend, self._gate, self._metrics, self._receive = backend, gate, metrics, receive
        self._caller, self._start, self._facts = caller, start, facts
        self._tokens = 0
        self._mail = EventQueue()
        self._watches: list[PromptMetrics] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stack = ExitStack()
        self._stack.enter_context(gate.inside(self._given_up, texts, caller))

    @property
    def choices(self) -> int:
        """Texts, over all prompts."""
        return len(self._watches) * self.params.n

    def submit(self, prompt: Sequence[int], *, priority: int = 0, deadline_s: float | None = None) -> None:
        """Hand a prompt to the engine; what it refuses comes out of ``events``."""
        place = len(self._watches)
        name = f"{self.id}-{place}"
        stream = self._backend.submit(
            prompt, self.params, id=name, priority=priority, deadline_s=deadline_s, salt=self._caller.salt
        )
        self._tokens += len(prompt)
        self._watches.append(self._metrics.watch(self.params.n, self._start))
        self._tasks.append(asyncio.create_task(self._pump(place, name, stream)))

    async def events(self, silence_s: float | None = None) -> AsyncGenerator[list[tuple[int, Event]], None]:
        """Lists of (choice, event) as they come; an empty one whenever nothing came for so many seconds.

        Raises:
            DataError, SettingsError, BusyError: the engine refuses a prompt.
            GoneError: the client has hung up.
            RefusedError: the model failed, or the server gave the request up.
        """
        left = self.choices
        self._tasks.append(asyncio.create_task(self._listen()))
        while left:
            news = await self._mail.take(silence_s)
            left -= sum(event.finished for _, event in news)
            yield news

    async def close(self) -> None:
        """Cancel what still runs, and let the gate know. May be called twice."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
            with log_errors("the accounts of a request"):
                self._count()
        finally:
            self._stack.close()

    def _count(self) -> None:
        """What the request was, for the log and the metrics, and what its caller owes."""
        self._facts |= {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        self._gate.took(time.monotonic() - self._start, self._used(), self._caller)
        for watch in self._watches:
            watch.close()

    def _used(self) -> int:
        """Tokens that the caller pays for, of texts that were given up too; once."""
        used, self._tokens = self._tokens, 0
        return used

    def _note(self, place: int, event: Event) -> None:
        """An event came: count it, and pass it on.

        Raises:
            RefusedError: a text ended as none should.
        """
        self._watches[place].saw(event, time.monotonic())
        self._tokens += len(event.token_ids)
        if event.usage is not None:
            self.prompt_tokens += event.usage.prompt_tokens
            self.completion_tokens += event.usage.completion_tokens
            self.cached_tokens += event.usage.cached_tokens
        if event.finish_reason is not None:
            self._facts.setdefault("finished", []).append(event.finish_reason)
        if event.finish_reason == "error":
            self._facts["error"] = event.error
            if isinstance(event.failure, UsageError | DataError):  # the request's own fault: a grammar, say
                raise api_error(event.failure, self._gate.retry_s())
            raise ApiError(500, f"the model failed on request {self.id}; the server's log has the reason")
        if event.finish_reason == "cancelled":
            raise ApiError(503, "the request was given up by the server", code="cancelled", retry_s=1)
        self._mail.put(place * self.params.n + event.sample, event)

    def _given_up(self) -> None:
        """The server goes down and waits no longer."""
        self._mail.fail(ApiError(503, "the server is shutting down", code="shutting_down", retry_s=1))

    def _failed(self, failure: BaseException) -> None:
        """What was refused, or broke, is an answer with a status and no text that was given up."""
        for watch in self._watches:
            watch.drop()
        self._mail.fail(failure)

    async def _pump(self, place: int, name: str, stream: AsyncIterator[Event]) -> None:
        left = self.params.n
        try:
            async for event in stream:
                left -= event.finished
                self._note(place, event)
            if left:
                raise RuntimeError(f"the events of request {name} ended before its texts")
        except ApiError as failure:
            self._mail.fail(failure)
        except Exception as failure:
            dead = ApiError(503, "the engine has stopped", code="engine_stopped")
            self._failed(failure if self._backend.alive else dead)
        finally:
            if left:
                self._backend.cancel(name)

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._mail.fail(ClientDisconnectedError())


MAX_EVENTS = 64  # events of one choice that wait before they are joined


class EventQueue:
    """Events on their way from the engine to one client; used from one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Event]] = {}  # by choice, in the order in which their first came
        self._failure: BaseException | None = None
        self._news = asyncio.Event()

    def __len__(self) -> int:
        """Events that wait."""
        return sum(map(len, self._waiting.values()))

    def put(self, choice: int, event: Event) -> None:
        """An event came; behind a failure none is of use."""
        if self._failure is not None:
            return
        waiting = self._waiting.setdefault(choice, [])
        waiting.append(event)
        if len(waiting) >= MAX_EVENTS:
            waiting[:] = [merge_events(waiting)]
        self._news.set()

    def fail(self, failure: BaseException) -> None:
        """Nothing more will come; of several failures the first is told."""
        self._failure = self._failure or failure
        self._news.set()

    async def take(self, silence_s: float | None = None) -> list[tuple[int, Event]]:
        """What waits; none where nothing came for so many seconds.

        Raises:
            what ``fail`` was given, behind the events that came before it.
        """
        if not self._news.is_set():
            try:
                async with asyncio.timeout(silence_s):
                    await self._news.wait()
            except TimeoutError:
                return []
        self._news.clear()
        waiting, self._waiting = self._waiting, {}
        if not waiting and self._failure is not None:
            raise self._failure
        if self._failure is not None:
            self._news.set()
        return [(choice, merge_events(events)) for choice, events in waiting.items()]


def merge_events(events: Sequence[Event]) -> Event:
    """One event that says what several of the same text say, in their order."""
    if len(events) == 1:
        return events[0]
    last = events[-1]
    return Event(
        last.request,
        last.sample,
        text="".join(event.text for event in events),
        token_ids=tuple(token for event in events for token in event.token_ids),
        logprobs=tuple(one for event in events for one in event.logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
        prompt_logprobs=next((e.prompt_logprobs for e in events if e.prompt_logprobs is not None), None),
        usage=last.usage,
    )
