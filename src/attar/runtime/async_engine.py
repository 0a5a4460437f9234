"""The engine for asyncio: it runs in its own thread and serves many coroutines.

    async with AsyncEngine(engine) as streams:
        async for event in streams.stream(prompt, params): ...

Only that thread uses the engine. Coroutines put calls (add, cancel, reads) into a queue, which the thread
empties before every step. The events of a step are delivered to each event loop in one call, because waking
a loop costs more than an event. Closing an iterator early (a client disconnected) cancels its request. An
error ends its own request (``engine.py``), is logged where it is not the client's fault, and the thread goes
on. A failed check of the engine ends the thread: every open iterator raises it. Grammars are compiled in
other threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from attar.errors import AttarError
from attar.runtime.engine import DEFAULT, Engine, PromptObserver
from attar.runtime.results import Event
from attar.runtime.sampling.params import SamplingParams

T = TypeVar("T")
Loop = asyncio.AbstractEventLoop
EventInbox = asyncio.Queue["Event | Exception"]

logger = logging.getLogger(__name__)


class AsyncEngine:
    """An engine for asyncio.

    Args:
        engine: not to be used by anything else from now on.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._readers: dict[str, tuple[Loop, EventInbox]] = {}
        self._compiling: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._open, self._closing = True, Lock()  # no call is queued after the thread emptied the queue
        self.failure: Exception | None = None  # what ended the thread unexpectedly
        self._thread = Thread(target=self._work, name="attar-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams = DEFAULT,
        *,
        id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        salt: str = "",
        adapter: str = "",
        observe: tuple[int, PromptObserver] | None = None,
    ) -> AsyncIterator[Event]:
        """The events of a request, those of its n completions interleaved; see :meth:`Engine.add`.

        Raises:
            as :meth:`Engine.add`, before the first event; AttarError when the engine is closed.
        """
        reader: tuple[Loop, EventInbox] = asyncio.get_running_loop(), asyncio.Queue()
        options: dict[str, Any] = {"id": id, "priority": priority, "deadline_s": deadline_s, "salt": salt}
        options |= {"adapter": adapter, "observe": observe}
        if params.guide is not None and self.engine.grammars is not None:
            async with self._compiling.setdefault(salt, asyncio.Lock()):  # each tenant one at a time
                options["matcher"] = await asyncio.to_thread(self.engine.grammars.matcher, params, salt)

        def add() -> str:
            name = self.engine.add(prompt, params, **options)
            self._readers[name] = reader
            return name

        added = asyncio.ensure_future(self.call(add))
        left = params.n
        try:
            await asyncio.shield(added)
            while left:
                event = await reader[1].get()
                if isinstance(event, Exception):
                    raise event
                left -= event.finished
                yield event
        finally:
            if left:
                added.add_done_callback(self._cancel_added)

    def cancel(self, id: str) -> None:
        """End a request soon; its iterator gets the last events. Unknown and finished ones are no error."""
        self._calls.put(lambda: self._deliver(self.engine.cancel(id)))

    async def call(self, function: Callable[[], T]) -> T:
        """Call a function in the engine's thread, between two steps; its result, or its error.

        Raises:
            AttarError: the engine is closed.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                if self.failure is not None:
                    raise AttarError("the engine is closed") from self.failure
                result = function()
            except Exception as error:
                _call_in_loop(loop, _resolve, answer, None, error)
            else:
                _call_in_loop(loop, _resolve, answer, result, None)

        with self._closing:
            if not self._open:
                raise AttarError("the engine is closed") from self.failure
            self._calls.put(run)
        return await answer

    async def close(self, *, drain_s: float = 0.0) -> None:
        """End the thread. Open requests may go on for ``drain_s`` seconds; what is left then is cancelled."""
        loop = asyncio.get_running_loop()
        until = loop.time() + drain_s
        while self._open and loop.time() < until and not await self.call(lambda: self.engine.idle):
            await asyncio.sleep(0.02)
        with self._closing:
            self._open = False
            self._calls.put(lambda: None)  # it may be waiting for a call
        await asyncio.to_thread(self._thread.join)

    def _cancel_added(self, added: asyncio.Future[str]) -> None:
        """Cancel a request whose iterator was closed, once it has an id."""
        if not added.cancelled() and added.exception() is None:
            self.cancel(added.result())

    def _work(self) -> None:
        try:
            if self.engine.grammars is not None:
                self.engine.grammars.prepare()
            while self._open:
                pause = self.engine.check_idle()
                self._run_calls(wait=self.engine.idle, seconds=pause)
                self._deliver(self.engine.step())
            self._run_calls(wait=False)
            for name in list(self._readers):
                self._deliver(self.engine.cancel(name))
            if self.engine.scheduler.manager.store is not None:
                self.engine.scheduler.manager.store.close()
        except BaseException as error:  # whatever ends the thread: no iterator may wait for it any longer
            failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
            with self._closing:
                self.failure, self._open = failure, False
            for loop, inbox in self._readers.values():
                _call_in_loop(loop, inbox.put_nowait, failure)
            self._readers.clear()
            self._run_calls(wait=False)

    def _run_calls(self, wait: bool, seconds: float | None = None) -> None:
        """Run all queued calls; ``wait`` up to ``seconds`` for the first, where the engine is idle."""
        try:
            self._calls.get(block=wait, timeout=seconds)()
            while True:
                self._calls.get_nowait()()
        except Empty:
            return

    def _deliver(self, events: Sequence[Event]) -> None:
        """Deliver events to the iterators that wait for them, each loop's in one call."""
        deliveries: dict[Loop, list[tuple[EventInbox, Event]]] = {}
        for event in events:
            reader = self._readers.get(event.request)
            if event.failure is not None and not isinstance(event.failure, AttarError):
                logger.error("request %s failed", event.request, exc_info=event.failure)
            if event.usage is not None:
                self._readers.pop(event.request, None)
            if reader is not None:
                loop, inbox = reader
                deliveries.setdefault(loop, []).append((inbox, event))
        for loop, events_of_loop in deliveries.items():
            _call_in_loop(loop, _put_events, events_of_loop)


def _put_events(events: Sequence[tuple[EventInbox, Event]]) -> None:
    """An event that cannot be delivered ends its own request."""
    for inbox, event in events:
        try:
            inbox.put_nowait(event)
        except Exception as failure:
            with suppress(Exception):
                inbox.put_nowait(failure)


def _resolve(answer: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    """Set a result, unless its coroutine was cancelled."""
    if answer.cancelled():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)


def _call_in_loop(loop: Loop, function: Callable[..., None], *values: Any) -> None:
    """Call a function in a loop; a closed loop is ignored."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *values)
