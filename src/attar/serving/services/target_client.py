"""The coordinator's stream to the target: requests out, events in; connected again where it ends.

A request that runs when the target is lost ends with one error; one that comes while there is no target is
refused at once. What the target says about drafts is handed on (``coordinator.py``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

from attar.errors import AttarError
from attar.runtime.results import Event
from attar.runtime.sampling.params import SamplingParams
from attar.serving.services.channel import (
    TARGET,
    FrameStream,
    Network,
    Security,
    StreamEnded,
    connect,
    run_until_first,
)
from attar.serving.services.drafter import Turnaround
from attar.serving.services.messages import (
    MOST_MESSAGES,
    Cancel,
    Close,
    Commit,
    DraftVerdict,
    EventMessage,
    Hello,
    Open,
    Ping,
    Pong,
    ProtocolError,
    Refusal,
    ServiceMessage,
    Submit,
    TargetLoad,
    UnavailableError,
    too_large,
)

FIRST_BACKOFF_S, MOST_BACKOFF_S = 0.1, 1.0
PING_S, DEAD_S = 0.25, 5.0
Inbox = asyncio.Queue[Event | Exception]

logger = logging.getLogger(__name__)


class TargetClient:
    """A target service.

    Args:
        hello: the own first message.
        drafting: called in the network's thread with what the target says about drafts; with None when the
            target is lost.
    """

    def __init__(
        self,
        endpoint: str,
        hello: Hello,
        network: Network,
        drafting: Callable[[Open | Commit | Close | DraftVerdict | None], None],
        security: Security | None = None,
    ) -> None:
        self.endpoint, self.hello, self.network, self.drafting = endpoint, hello, network, drafting
        self.security, self.round_trip = security or Security(), Turnaround()
        self.target: Hello | None = None
        self.load: TargetLoad | None = None
        self.connected, self.reason, self.connections = False, "not connected yet", 0
        self._readers: dict[str, tuple[asyncio.AbstractEventLoop, Inbox, int]] = {}  # with the samples
        self._outbox: deque[ServiceMessage] = deque()
        self._wake = asyncio.Event()
        self._ping, self._answered, self._pinged = 0, 0, 0.0
        self._task = network.run(self._start())

    async def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        id: str,
        priority: int = 0,
        deadline_s: float | None = None,
        salt: str = "",
        traceparent: str = "",
    ) -> AsyncIterator[Event]:
        """The events of a request, in the caller's loop.

        Raises:
            UnavailableError: the target cannot be reached, or is lost meanwhile.
            as :meth:`attar.runtime.engine.Engine.add`.
        """
        inbox: Inbox = asyncio.Queue()
        message = Submit(id, tuple(prompt), params, priority, deadline_s, salt[:256], traceparent)
        self.network.post(self._begin, message, asyncio.get_running_loop(), inbox)
        left = params.n
        try:
            while left:
                event = await inbox.get()
                if isinstance(event, Exception):
                    left = 0
                    raise event
                left -= event.finished
                yield event
        finally:
            self.network.post(self._end, id, bool(left))

    def cancel(self, id: str) -> None:
        """End a request soon."""
        self.network.post(self._end, id, True)

    def send(self, message: ServiceMessage) -> None:
        """Send soon, from the network's thread; dropped while there is no target."""
        if self.connected:
            self._outbox.append(message)
            self._wake.set()

    def close(self) -> None:
        """End the stream."""
        self.network.post(self._task.cancel)

    @property
    def open_requests(self) -> int:
        """Requests that run or wait."""
        return len(self._readers)

    async def _start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._run())

    def _begin(self, message: Submit, loop: asyncio.AbstractEventLoop, inbox: Inbox) -> None:
        if not self.connected:
            _put(
                loop, inbox, UnavailableError(f"the target {self.endpoint} cannot be reached: {self.reason}")
            )
            return
        self._readers[message.id] = loop, inbox, message.params.n
        self.send(message)

    def _end(self, id: str, cancel: bool) -> None:
        if self._readers.pop(id, None) is not None and cancel:
            self.send(Cancel(id))

    async def _run(self) -> None:
        backoff = FIRST_BACKOFF_S
        while True:
            began, reason = time.monotonic(), ""
            try:
                async with connect(self.endpoint, TARGET, self.security) as stream:
                    await self._serve(stream)
            except (AttarError, StreamEnded) as error:
                reason = str(error)
            except Exception as error:
                logger.exception("the stream to %s failed", self.endpoint)
                reason = repr(error)
            finally:
                self._lost(reason)
            backoff = FIRST_BACKOFF_S if time.monotonic() - began > MOST_BACKOFF_S else backoff
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MOST_BACKOFF_S)

    async def _serve(self, stream: FrameStream) -> None:
        self.target = await stream.handshake(self.hello, "target")
        self.connected, self.reason = True, ""
        self.connections += 1
        self._ping = self._answered = 0
        logger.info("%s runs %s", self.endpoint, self.target.name)
        await run_until_first(self._write(stream), self._read(stream), self._pings())

    async def _write(self, stream: FrameStream) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                count = min(len(self._outbox), MOST_MESSAGES)
                for message in await stream.write([self._outbox.popleft() for _ in range(count)]):
                    if isinstance(message, Submit):
                        self._deliver(message.id, too_large("request", "send a shorter one"), True)

    async def _read(self, stream: FrameStream) -> None:
        while True:
            for message in await stream.read():
                if isinstance(message, EventMessage):
                    self._check(message)
                    self._deliver(message.request, message.event(), message.usage is not None)
                elif isinstance(message, Refusal):
                    self._deliver(message.request, message.failure(), True)
                elif isinstance(message, TargetLoad):
                    self.load = message
                elif isinstance(message, Open | Commit | Close | DraftVerdict):
                    self.drafting(message)
                elif isinstance(message, Pong):
                    self._answered = message.number
                    self.round_trip.note(time.monotonic() - self._pinged)
                else:
                    raise ProtocolError(f"a target does not send {message.kind}")

    async def _pings(self) -> None:
        while True:
            if self._answered == self._ping:
                self._ping, self._pinged = self._ping + 1, time.monotonic()
                self.send(Ping(self._ping))
            elif time.monotonic() - self._pinged > DEAD_S:
                raise ProtocolError(f"the target {self.endpoint} does not answer")
            await asyncio.sleep(PING_S)

    def _deliver(self, id: str, event: Event | Exception, last: bool) -> None:
        reader = self._readers.get(id)
        if reader is None:
            return
        if last:
            del self._readers[id]
        _put(*reader[:2], event)

    def _check(self, event: EventMessage) -> None:
        """An event is of a sample that its request has."""
        _, _, samples = self._readers.get(event.request, (None, None, event.sample + 1))
        if event.sample >= samples:
            raise ProtocolError(f"the target sends sample {event.sample} of {samples}")

    def _lost(self, reason: str) -> None:
        """Every request that runs ends with one error."""
        if reason and reason != self.reason:
            logger.warning("%s: %s; tried again", self.endpoint, reason)
        self.connected, self.reason, self.load = False, reason, None
        self._outbox.clear()
        readers, self._readers = self._readers, {}
        for loop, inbox, _ in readers.values():
            _put(loop, inbox, UnavailableError(f"the target {self.endpoint} was lost"))
        self.drafting(None)


def _put(loop: asyncio.AbstractEventLoop, inbox: Inbox, event: Event | Exception) -> None:
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(inbox.put_nowait, event)
