"""One HTTP request in the engine: its prompts are submitted, its events queued, and the rest cancelled.

    submit()  →  events(): lists of events, an empty one after a silence  →  close()

Choice = index of the prompt * n + sample. One queue per request takes the events of all its prompts and the
client's disconnect, so a request waits in one place and ends in one place. Events are counted and timed when
they arrive, not when a slow client reads them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

from starlette.requests import Request

from attar.errors import DataError, UsageError
from attar.runtime.results import Event
from attar.runtime.sampling.params import SamplingParams
from attar.serving.http.access_log import log_errors
from attar.serving.http.errors import ApiError, api_error
from attar.serving.http.metrics import PromptMetrics
from attar.serving.http.middleware import ASGIReceive
from attar.serving.http.service import Service
from attar.serving.services.trace import usage_attributes

MAX_EVENTS = 64  # events of a choice that wait before they are merged

OPERATIONS = {"cmpl": "text_completion", "llama": "text_completion"}
"""Operation of the ``gen_ai`` conventions by the prefix of a request's id; all others chat."""

ChoiceEvents = list[tuple[int, Event]]
"""Choices with their next event."""


class ClientDisconnectedError(Exception):
    """The client has disconnected."""


def _attributes(params: SamplingParams) -> dict[str, Any]:
    """How a request samples, by the ``gen_ai`` conventions."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")
    choices = {"gen_ai.request.choice.count": params.n} if params.n > 1 else {}
    return {f"gen_ai.request.{name}": getattr(params, name) for name in names} | choices


class EventQueue:
    """Events between the engine and one client; used from one event loop.

    The engine never waits for a client. Waiting events of a choice are merged, so a slow client gets fewer
    and larger chunks, and at most ``MAX_EVENTS`` events of a choice are kept.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, list[Event]] = {}  # by choice, in the order of their first events
        self._failure: BaseException | None = None
        self._ready = asyncio.Event()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, choice: int, event: Event) -> None:
        """Add an event; dropped after a failure."""
        if self._failure is not None:
            return
        waiting = self._waiting.setdefault(choice, [])
        waiting.append(event)
        if len(waiting) >= MAX_EVENTS:
            waiting[:] = [merge_events(waiting)]
        self._ready.set()

    def fail(self, failure: BaseException) -> None:
        """End the queue with an exception; the first one counts."""
        self._failure = self._failure or failure
        self._ready.set()

    async def get(self, silence_s: float | None = None) -> ChoiceEvents:
        """All waiting events, merged by choice; none after ``silence_s`` seconds without one.

        Raises:
            the exception of ``fail``, after the events before it.
        """
        if not self._ready.is_set():
            try:
                async with asyncio.timeout(silence_s):
                    await self._ready.wait()
            except TimeoutError:
                return []
        self._ready.clear()
        waiting, self._waiting = self._waiting, {}
        if not waiting and self._failure is not None:
            raise self._failure
        if self._failure is not None:
            self._ready.set()
        return [(choice, merge_events(events)) for choice, events in waiting.items()]


def merge_events(events: Sequence[Event]) -> Event:
    """Consecutive events of a completion as one event."""
    if len(events) == 1:
        return events[0]
    last = events[-1]
    return Event(
        last.request,
        last.sample,
        text="".join(event.text for event in events),
        token_ids=tuple(token for event in events for token in event.token_ids),
        logprobs=tuple(logprob for event in events for logprob in event.logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
        prompt_logprobs=next((e.prompt_logprobs for e in events if e.prompt_logprobs is not None), None),
        usage=last.usage,
        proposers=tuple(proposer for event in events for proposer in event.proposers),
    )


class RequestHandler:
    """Runs one HTTP request in the engine.

    Args:
        service: its admission counts the request until it is closed.
        request: tells that the client has left; its line in the access log is added to.
        prefix: of the request's id.
        priority: requested; None or 0: the caller's.
        start: time of arrival.

    Raises:
        ApiError: 400, the caller may not choose a priority.
    """

    def __init__(
        self,
        service: Service,
        request: Request,
        prefix: str,
        params: SamplingParams,
        prompts: list[list[int]],
        *,
        priority: int | None,
        start: float,
    ) -> None:
        self.service, self.params, self.prompts = service, params, prompts
        self._receive, self._caller, self._start = request.receive, service.caller(request), start
        self._priority = service.priority_of(priority, self._caller)
        self._log_fields: dict[str, Any] = request.scope["state"]["log_fields"]
        self.id = self._log_fields["request"] = f"{prefix}-{uuid4().hex}"
        self.created = int(time.time())  # the same in every chunk
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0
        self.lossy = False
        self._billed_tokens, self._begun, self._failed = 0, False, ""
        self._queue = EventQueue()
        self._prompt_metrics: list[PromptMetrics] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stack = ExitStack()
        self._stack.enter_context(service.admission.serving(self._shut_down, self.choices, self._caller))
        self._span = service.tracer.begin(
            OPERATIONS.get(prefix, "chat"),
            service.model,
            id=self.id,
            start=start,
            headers=request.headers,
            attributes={"gen_ai.response.id": self.id, **_attributes(params)},
        )

    @property
    def choices(self) -> int:
        """Completions of all prompts."""
        return len(self.prompts) * self.params.n

    async def submit(self) -> None:
        """Submit the prompts to the engine; ``events`` raises if the engine refuses one. A request that fails
        here is closed."""
        deadline_s, salt = self.service.settings.request_s or None, self._caller.salt
        options: dict[str, Any] = {"priority": self._priority, "deadline_s": deadline_s, "salt": salt}
        try:
            for index, prompt in enumerate(self.prompts):
                id = f"{self.id}-{index}"
                stream = self.service.backend.submit(prompt, self.params, id=id, **options)
                self._billed_tokens += len(prompt)
                self._prompt_metrics.append(self.service.metrics.of_prompt(self.params.n, self._start))
                self._tasks.append(asyncio.create_task(self._read_stream(index, id, stream)))
        except BaseException:
            await self.close()
            raise

    async def events(self, silence_s: float | None = None) -> AsyncGenerator[ChoiceEvents, None]:
        """Lists of (choice, event) as they arrive; an empty list after each ``silence_s`` seconds without
        events.

        Raises:
            DataError, SettingsError, BusyError: the engine refuses a prompt.
            ClientDisconnectedError: the client has disconnected.
            ApiError: the model failed, or the server shuts down.
        """
        open_choices = self.choices
        self._tasks.append(asyncio.create_task(self._wait_for_disconnect()))
        while open_choices:
            events = await self._queue.get(silence_s)
            open_choices -= sum(event.finished for _, event in events)
            yield events

    async def close(self) -> None:
        """Cancel what still runs, and release the admission. May be called twice."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
            with log_errors("the accounting of a request"):
                self._account()
        finally:
            self._stack.close()

    def _account(self) -> None:
        """Write the token counts to the log, the metrics and the caller's budget. The caller pays for
        cancelled completions too, once."""
        self._log_fields["prompt_tokens"] = self.prompt_tokens
        self._log_fields["completion_tokens"] = self.completion_tokens
        self._end_span()
        tokens, self._billed_tokens = self._billed_tokens, 0
        self.service.admission.served(time.monotonic() - self._start, tokens, self._caller)
        for metrics in self._prompt_metrics:
            metrics.close()

    def _end_span(self) -> None:
        reasons = list(self._log_fields.get("finished", ()))
        reasons += ["cancelled"] * (self.choices - len(reasons))
        usage = {"input_tokens": self.prompt_tokens, "output_tokens": self.completion_tokens}
        usage["cache_read.input_tokens"] = self.cached_tokens
        bad = next((reason for reason in reasons if reason in ("error", "cancelled")), "")
        self._span.end(self._failed or bad, usage_attributes(usage, reasons))

    def _on_event(self, index: int, event: Event) -> None:
        """Count an event and queue it.

        Raises:
            ApiError: the completion failed or was cancelled.
        """
        self._prompt_metrics[index].observe(event, time.monotonic())
        if event.token_ids and not self._begun:
            self._begun = True
            self._span.event("gen_ai.first_token", **{"attar.seconds": time.monotonic() - self._start})
        self._billed_tokens += len(event.token_ids)
        if event.usage is not None:
            self.prompt_tokens += event.usage.prompt_tokens
            self.completion_tokens += event.usage.completion_tokens
            self.cached_tokens += event.usage.cached_tokens
            self.lossy = self.lossy or event.usage.lossy
        if event.finish_reason is not None:
            self._log_fields.setdefault("finished", []).append(event.finish_reason)
        if event.finish_reason == "error":
            self._log_fields["error"] = event.error
            if isinstance(
                event.failure, UsageError | DataError
            ):  # the request's own fault, such as a grammar
                raise api_error(event.failure, self.service.admission.retry_s())
            raise ApiError(500, f"the model failed on request {self.id}; the server's log has the reason")
        if event.finish_reason == "cancelled":
            raise ApiError(503, "the server cancelled the request", code="cancelled", retry_s=1)
        self._queue.put(index * self.params.n + event.sample, event)

    def _shut_down(self) -> None:
        self._queue.fail(ApiError(503, "the server is shutting down", code="shutting_down", retry_s=1))

    async def _read_stream(self, index: int, id: str, stream: AsyncIterator[Event]) -> None:
        """Queue the events of a prompt."""
        unfinished = self.params.n
        try:
            async for event in stream:
                unfinished -= event.finished
                self._on_event(index, event)
            if unfinished:
                raise RuntimeError(f"the events of request {id} ended before its completions")
        except ApiError as failure:
            self._queue.fail(failure)
        except Exception as failure:  # refused or broken: an error status, not a cancelled completion
            self._failed = type(failure).__name__
            for metrics in self._prompt_metrics:
                metrics.discard()
            stopped = ApiError(503, "the engine has stopped", code="engine_stopped")
            self._queue.fail(failure if self.service.backend.alive else stopped)
        finally:
            if unfinished:
                self.service.backend.cancel(id)

    async def _wait_for_disconnect(self) -> None:
        await disconnect(self._receive)
        self._queue.fail(ClientDisconnectedError())


async def disconnect(receive: ASGIReceive) -> None:
    """Waits until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(work: Awaitable[Any], request: Request) -> Any:
    """The result of some work, which is cancelled when the client leaves.

    Raises:
        ApiError: 499, the client has disconnected.
    """

    task, gone = asyncio.ensure_future(work), asyncio.create_task(disconnect(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client has disconnected")
        try:
            return task.result()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
