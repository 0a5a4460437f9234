"""The stream to one draft service: kept open, tried again with backoff, never trusted.

    dead     the stream ends: at once without it, and connected again
    hung     a ping is not answered within HANG_S: left out until its pong comes
    lies     an offer that no honest drafter sends, or more offers than messages allow: the stream is cut
    useless  almost none of its drafts is accepted: left out for a while, twice as long each time

Each connection is a ``DraftLink`` of its own, so requests of a lost one are never taken for those of the
next.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from attar.errors import AttarError
from attar.serving.services.channel import (
    DRAFT,
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
    Close,
    Commit,
    Hello,
    Offer,
    Open,
    Ping,
    Pong,
    ProtocolError,
    ServiceMessage,
)
from attar.serving.services.offers import Outcome

PING_S, HANG_S, DEAD_S = 0.25, 1.0, 5.0
FIRST_BACKOFF_S, MOST_BACKOFF_S = 0.1, 1.0  # between two connections
FIRST_PAUSE_S, MOST_PAUSE_S = 0.25, 1.5  # of a drafter that lies, or whose drafts are not accepted
JUDGED, ACCEPTED, FADE = 64.0, 0.02, 0.98  # verified drafts, share of them with an accepted token, decay
SPARE = 64  # offers beyond the number that messages allow
MOST_WAITING = 8192  # messages that wait to be sent

logger = logging.getLogger(__name__)


@dataclass
class DraftClientCounts:
    """Counts since the start: connections, cuts for what it sent, verified drafts and accepted tokens."""

    connections: int = 0
    cut: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0


class DraftClient:
    """A draft service, as a replica.

    Args:
        endpoint: ``host:port``.
        hello: the own first message.
        receive: called in the network's thread with each offer; says what became of it.
    """

    def __init__(
        self,
        endpoint: str,
        hello: Hello,
        network: Network,
        receive: Callable[[Offer], Outcome],
        security: Security | None = None,
    ) -> None:
        self.endpoint, self.hello, self.network, self.receive = endpoint, hello, network, receive
        self.security = security or Security()
        self.turnaround, self.round_trip, self.counts = Turnaround(), Turnaround(), DraftClientCounts()
        self.link: DraftLink | None = None
        self.reason = "not connected yet"
        self.parent_of: Callable[[str], str] = lambda request: ""  # the traceparent of its span
        self.paused_until, self._pause_s = 0.0, FIRST_PAUSE_S
        self._share, self._judged = 1.0, 0.0
        self._task = network.run(self._start())

    @property
    def ready(self) -> bool:
        """Whether it may get requests."""
        return self.link is not None and self.link.ready

    def record_verdict(self, drafted: int, accepted: int) -> None:
        """Pause it where almost nothing is accepted."""
        self.counts.drafts += 1
        self.counts.drafted += drafted
        self.counts.accepted += accepted
        self._judged = FADE * self._judged + 1
        self._share += (bool(accepted) - self._share) / min(self._judged, 1 / (1 - FADE))
        if self._judged < min(JUDGED, 0.7 / (1 - FADE)):
            return
        if self._share < ACCEPTED:
            logger.warning("%s: its drafts are not accepted; left out", self.endpoint)
            self.paused_until = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, MOST_PAUSE_S)
            self._share, self._judged = 1.0, 0.0
        else:
            self._pause_s = FIRST_PAUSE_S

    def close(self) -> None:
        """End the stream."""
        self.network.post(self._task.cancel)

    async def _start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._run())

    async def _run(self) -> None:
        backoff = FIRST_BACKOFF_S
        while True:
            began, pause = time.monotonic(), 0.0
            try:
                async with connect(self.endpoint, DRAFT, self.security) as stream:
                    await self._serve(stream)
            except StreamEnded as error:
                self._failed(str(error))
            except AttarError as error:
                self._failed(error.message)
                pause, self._pause_s = self._pause_s, min(2 * self._pause_s, MOST_PAUSE_S)
            except Exception as error:  # whatever a peer provokes: it is tried again
                logger.exception("the stream to %s failed", self.endpoint)
                self._failed(repr(error))
            backoff = FIRST_BACKOFF_S if time.monotonic() - began > MOST_BACKOFF_S else backoff
            await asyncio.sleep(max(backoff, pause))
            backoff = min(2 * backoff, MOST_BACKOFF_S)

    async def _serve(self, stream: FrameStream) -> None:
        other = await stream.handshake(self.hello, "draft")
        link = DraftLink(self, other.name, self.turnaround)
        self.counts.connections += 1
        self.link, self.reason = link, ""
        logger.info("%s drafts: %s", self.endpoint, other.name)
        try:
            await run_until_first(link.write(stream), link.read(stream), link.ping())
        finally:
            link.closed, self.link = True, None

    def _failed(self, reason: str) -> None:
        if reason != self.reason:
            logger.warning("%s: %s; tried again", self.endpoint, reason)
        self.reason = reason


class DraftLink:
    """One connection: the ``Drafter`` of the requests that were opened on it."""

    def __init__(self, client: DraftClient, name: str, turnaround: Turnaround) -> None:
        self.client, self.name, self.turnaround = client, name, turnaround
        self.closed = self.hung = False
        self.open_requests = 0
        self._outbox: deque[ServiceMessage] = deque()
        self._wake, self._waking = asyncio.Event(), False
        self._credit = SPARE  # offers that may come
        self._ping, self._pinged = 0, 0.0
        self._answered = 0

    @property
    def ready(self) -> bool:
        return not (self.closed or self.hung) and time.monotonic() >= self.client.paused_until

    def send(self, message: ServiceMessage) -> None:
        """Send soon; a connection that is closed sends nothing."""
        if self.closed:
            return
        if isinstance(message, Open):
            self.open_requests += 1
            message = replace(message, traceparent=self.client.parent_of(message.trace))
        elif isinstance(message, Close):
            self.open_requests -= 1
        self._outbox.append(message)
        if not self._waking:
            self._waking = True
            self.client.network.post(self._wake.set)

    def record_verdict(self, drafted: int, accepted: int) -> None:
        self.client.record_verdict(drafted, accepted)

    async def write(self, stream: FrameStream) -> None:
        """Send what waits, for ever.

        Raises:
            ProtocolError: it does not read.
        """
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._waking = False
            while self._outbox:
                count = min(len(self._outbox), MOST_MESSAGES)
                messages = [self._outbox.popleft() for _ in range(count)]
                for message in messages:
                    if isinstance(message, Open | Commit):
                        self._credit += message.ahead + 2
                await stream.write(messages)

    async def read(self, stream: FrameStream) -> None:
        """Receive offers, for ever.

        Raises:
            ProtocolError: what it sends is not allowed.
        """
        while True:
            for message in await stream.read():
                if isinstance(message, Pong):
                    self._pong(message)
                elif isinstance(message, Offer):
                    self._offer(message)
                else:
                    self._cut(f"it sends {message.kind}")
            self._credit = min(self._credit, (SPARE + self.open_requests) * SPARE)

    async def ping(self) -> None:
        """Ask whether it drafts, for ever.

        Raises:
            ProtocolError: it does not answer, or does not read.
        """
        while True:
            waited = time.monotonic() - self._pinged
            if self._answered == self._ping:
                self.hung = False
                self._ping, self._pinged = self._ping + 1, time.monotonic()
                self.send(Ping(self._ping))
            elif waited > DEAD_S or len(self._outbox) > MOST_WAITING:
                raise ProtocolError("it does not answer")
            elif waited > HANG_S and not self.hung:
                self.hung = True
                logger.warning("%s: no answer for %g s; left out", self.client.endpoint, HANG_S)
            await asyncio.sleep(PING_S)

    def _pong(self, pong: Pong) -> None:
        if pong.number != self._ping or self._answered == self._ping:
            self._cut("it answers what was not asked")
        self._answered, self.hung = self._ping, False
        self.client.round_trip.note(time.monotonic() - self._pinged)

    def _offer(self, offer: Offer) -> None:
        self._credit -= 1
        outcome = self.client.receive(offer)
        if outcome == "wrong":
            self._cut("it offers tokens on a length that no message had, or outside of the vocabulary")
        if self._credit < 0:
            self._cut("it sends more offers than it was asked for")

    def _cut(self, reason: str) -> None:
        self.client.counts.cut += 1
        raise ProtocolError(reason)
