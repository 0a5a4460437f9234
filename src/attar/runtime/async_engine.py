"""Many texts at a time under asyncio: the engine runs in a thread of its own.

    async with Streams(engine) as streams:
        async for event in streams.stream(prompt, params): ...

Only the thread touches the engine. Coroutines leave orders (add, cancel, anything that looks at it) in a
queue, which the thread empties before every step. A step's events come back together through the loop that
asked, for waking it costs more than an event does. An iterator that is closed early (a client went away)
cancels its request. An error ends its own request (``engine.py``), is logged where it is not the client's,
and the thread goes on. What should never happen (a check that fails) ends the thread: every open iterator
raises it. Grammars are compiled in other threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

from attar.errors import AttarError
from attar.runtime.engine import DEFAULT, Engine
from attar.runtime.results import Event
from attar.runtime.sampling.params import SamplingParams

T = TypeVar("T")
Loop = asyncio.AbstractEventLoop
EventInbox = asyncio.Queue["Event | Exception"]

logger = logging.getLogger(__name__)


class AsyncEngine:
    """An engine for asyncio.

    Args:
        engine: nobody else may use it from now on.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._readers: dict[str, tuple[Loop, EventInbox]] = {}
        self._open, self._closing = True, Lock()  # every order is given before the thread looks for the last
        self.failure: Exception | None = None  # what ended the thread, where it should not have ended
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
    ) -> AsyncIterator[Event]:
        """The events of a request, those of its n texts mixed; see :meth:`Engine.add`.

        Raises:
            as :meth:`Engine.add`, before the first event; AttarError when the engine is closed.
        """
        reader: tuple[Loop, EventInbox] = asyncio.get_running_loop(), asyncio.Queue()
        options: dict[str, Any] = {"id": id, "priority": priority, "deadline_s": deadline_s, "salt": salt}
        if params.guide is not None and self.engine.grammars is not None:
            options["matcher"] = await asyncio.to_thread(self.engine.grammars.matcher, params)

        def begin() -> str:
            name = self.engine.add(prompt, params, **options)
            self._readers[name] = reader
            return name

        asked = asyncio.ensure_future(self.ask(begin))
        left = params.n
        try:
            await asyncio.shield(asked)
            while left:
                event = await reader[1].get()
                if isinstance(event, Exception):
                    raise event
                left -= event.finished
                yield event
        finally:
            if left:
                asked.add_done_callback(self._gone)

    def cancel(self, id: str) -> None:
        """End a request soon; its iterator gets the last events. Unknown and finished ones are no error."""
        self._orders.put(lambda: self._deliver(self.engine.cancel(id)))

    async def ask(self, order: Callable[[], T]) -> T:
        """Run something in the engine's thread, between two steps; its result, or its error.

        Raises:
            AttarError: the engine is closed.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def act() -> None:
            try:
                if self.failure is not None:
                    raise AttarError("the engine is closed") from self.failure
                result = order()
            except Exception as error:
                _tell(loop, _settle, answer, None, error)
            else:
                _tell(loop, _settle, answer, result, None)

        with self._closing:
            if not self._open:
                raise AttarError("the engine is closed") from self.failure
            self._orders.put(act)
        return await answer

    async def close(self, *, drain_s: float = 0.0) -> None:
        """End the thread. Open texts may go on for so many seconds; what is left then is cancelled."""
        loop = asyncio.get_running_loop()
        until = loop.time() + drain_s
        while self._open and loop.time() < until and not await self.ask(lambda: self.engine.idle):
            await asyncio.sleep(0.02)
        with self._closing:
            self._open = False
            self._orders.put(lambda: None)  # it may be waiting for an order
        await asyncio.to_thread(self._thread.join)

    def _gone(self, asked: asyncio.Future[str]) -> None:
        """A reader is gone. Called by its loop once its request has a name."""
        if not asked.cancelled() and asked.exception() is None:
            self.cancel(asked.result())

    def _work(self) -> None:
        try:
            if self.engine.grammars is not None:
                self.engine.grammars.prepare()
            while self._open:
                pause = self.engine.check_idle()
                self._obey(wait=self.engine.idle, seconds=pause)
                self._deliver(self.engine.step())
            self._obey(wait=False)
            for name in list(self._readers):
                self._deliver(self.engine.cancel(name))
        except BaseException as broken:  # whatever ends the thread: nobody may wait for it any longer
            failure = broken if isinstance(broken, Exception) else RuntimeError(repr(broken))
            with self._closing:
                self.failure, self._open = failure, False
            for loop, news in self._readers.values():
                _tell(loop, news.put_nowait, failure)
            self._readers.clear()
            self._obey(wait=False)

    def _obey(self, wait: bool, seconds: float | None = None) -> None:
        """Carry out every order there is; ``wait`` for the first, so many seconds, where the engine has
        nothing to do."""
        try:
            self._orders.get(block=wait, timeout=seconds)()
            while True:
                self._orders.get_nowait()()
        except Empty:
            return

    def _deliver(self, events: Sequence[Event]) -> None:
        """To each loop what its readers wait for, in one call."""
        mail: dict[Loop, list[tuple[EventInbox, Event]]] = {}
        for event in events:
            reader = self._readers.get(event.request)
            if event.failure is not None and not isinstance(event.failure, AttarError):
                logger.error("request %s failed", event.request, exc_info=event.failure)
            if event.usage is not None:
                self._readers.pop(event.request, None)
            if reader is not None:
                loop, news = reader
                mail.setdefault(loop, []).append((news, event))
        for loop, letters in mail.items():
            _tell(loop, _hand_out, letters)


def _hand_out(letters: Sequence[tuple[EventInbox, Event]]) -> None:
    """One that cannot be handed out ends its own request."""
    for news, event in letters:
        try:
            news.put_nowait(event)
        except Exception as failure:
            with suppress(Exception):
                news.put_nowait(failure)


def _settle(answer: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    """Answer, unless whoever asked has gone."""
    if answer.cancelled():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)


def _tell(loop: Loop, act: Callable[..., None], *values: Any) -> None:
    """Call something in a loop; a loop that has ended wants nothing."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(act, *values)
