"""An engine for coordinators: requests and offers in, events and commits out, on one stream each.

    submit    a task reads the request's events from the engine and leaves them to be sent
    open, commit, close     what the engine's ``OfferProposer`` tells the drafters goes to the coordinator of
              the request, which has the draft services
    leave     everything that a coordinator asked for is cancelled with its stream

The engine's thread only leaves messages. A coordinator that does not read them is cut once MOST_WAITING wait;
no request waits for another's reader.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from attar.errors import AttarError
from attar.runtime.admission import BusyError
from attar.runtime.async_engine import AsyncEngine
from attar.serving.services.channel import FrameStream, run_until_first
from attar.serving.services.drafter import Drafter, Turnaround
from attar.serving.services.messages import (
    MOST_MESSAGES,
    Cancel,
    Close,
    Drafters,
    DraftVerdict,
    EventMessage,
    Hello,
    Offer,
    Open,
    Ping,
    Pong,
    ProtocolError,
    Refusal,
    ServiceMessage,
    Submit,
    TargetLoad,
    too_large,
)
from attar.serving.services.offers import Outcome
from attar.serving.services.trace import RequestTracer, log_request, usage_attributes

MOST_REQUESTS = 4096  # of a coordinator at a time
MOST_WAITING = 1 << 17  # messages that wait to be sent to one
LOAD_S = 0.25  # seconds between two messages of the load

logger = logging.getLogger(__name__)


class TargetService:
    """The coordinators of an engine; the pool of its ``OfferProposer``.

    Attributes:
        hello: the own first message.
        streams: the engine.
        load: its load now.
        receive: where offers go; None: the engine drafts itself, or not at all.
        owners: the coordinator of each request.
        tracer: of the requests' spans.
    """

    def __init__(self) -> None:
        self.hello: Hello | None = None
        self.streams: AsyncEngine | None = None
        self.load: Callable[[], TargetLoad] | None = None
        self.receive: Callable[[Offer], Outcome] | None = None
        self.coordinators: dict[CoordinatorStream, None] = {}
        self.owners: dict[str, CoordinatorStream] = {}  # by request
        self.tracer = RequestTracer()

    def pool(self, hello: Hello, receive: Callable[[Offer], Outcome]) -> TargetService:
        """Itself, as the drafters of an engine."""
        self.hello, self.receive = hello, receive
        return self

    def ready_for(self, request: str) -> bool:
        """Whether a coordinator submitted the request, and has drafters; called from the engine's thread."""
        owner = self.owners.get(request)
        return owner is not None and owner.drafters > 0 and not owner.closed

    def choose(self, opening: Open) -> Drafter | None:
        """The drafters of the coordinator that submitted the request; called from the engine's thread."""
        owner = self.owners.get(opening.trace)
        if owner is None or not self.ready_for(opening.trace):
            return None
        drafter = RemoteDrafter(owner, opening.request)
        owner.remote[opening.request] = drafter
        return drafter

    async def serve(self, stream: FrameStream) -> None:
        """Serve a coordinator until it leaves.

        Raises:
            ProtocolError: it breaks the protocol.
            StreamEnded: it has left.
        """
        assert self.hello is not None, "the engine has not started"
        await stream.handshake(self.hello, "coordinator")
        coordinator = CoordinatorStream(self)
        self.coordinators[coordinator] = None
        try:
            await run_until_first(coordinator.read(stream), coordinator.write(stream), coordinator.report())
        finally:
            del self.coordinators[coordinator]
            await coordinator.close()


class CoordinatorStream:
    """One coordinator: its requests, and what waits to be sent to it."""

    def __init__(self, service: TargetService) -> None:
        self.service, self.closed, self.drafters = service, False, 0
        self.turnaround = Turnaround()
        self.remote: dict[int, RemoteDrafter] = {}
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._outbox: deque[ServiceMessage] = deque()
        self._loop, self._wake, self._waking = asyncio.get_running_loop(), asyncio.Event(), False

    def send(self, message: ServiceMessage) -> None:
        """Send soon; from any thread."""
        if self.closed:
            return
        self._outbox.append(message)
        if not self._waking:
            self._waking = True
            try:
                self._loop.call_soon_threadsafe(self._wake.set)
            except RuntimeError:  # the loop is closed
                self.closed = True

    async def write(self, stream: FrameStream) -> None:
        """Send what waits, for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._waking = False
            while self._outbox:
                count = min(len(self._outbox), MOST_MESSAGES)
                messages = [self._outbox.popleft() for _ in range(count)]
                for message in await stream.write(messages, _refused):
                    if isinstance(message, EventMessage):
                        self._cancel(message.request)

    async def report(self) -> None:
        """Send the load, for ever.

        Raises:
            ProtocolError: the coordinator does not read.
        """
        while True:
            if self.service.load is not None:
                self.send(self.service.load())
            if len(self._outbox) > MOST_WAITING:
                raise ProtocolError("the coordinator does not read")
            await asyncio.sleep(LOAD_S)

    async def read(self, stream: FrameStream) -> None:
        """Receive requests and offers, for ever."""
        while True:
            for message in await stream.read():
                if isinstance(message, Submit):
                    self._submit(message)
                elif isinstance(message, Cancel):
                    self._cancel(message.id)
                elif isinstance(message, Offer):
                    self._offer(message)
                elif isinstance(message, Close):
                    self._lost(message.request)
                elif isinstance(message, Drafters):
                    self.drafters = message.ready
                elif isinstance(message, Ping):
                    self.send(Pong(message.number))
                else:
                    raise ProtocolError(f"a coordinator does not send {message.kind}")

    async def close(self) -> None:
        """Cancel all its requests."""
        self.closed = True
        tasks = list(self._requests.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._outbox.clear()

    def _submit(self, message: Submit) -> None:
        if message.id in self.service.owners:
            self.send(Refusal(message.id, "settings", "a request of this id runs already", "id"))
        elif len(self._requests) >= MOST_REQUESTS:
            self.send(Refusal.of(message.id, BusyError(f"{MOST_REQUESTS:,} requests run already")))
        else:
            self.service.owners[message.id] = self
            self._requests[message.id] = asyncio.create_task(self._run(message))

    async def _run(self, message: Submit) -> None:
        streams, id = self.service.streams, message.id
        began, tokens, reasons, error = time.monotonic(), 0, list[str](), "cancelled"
        model = "" if self.service.hello is None else self.service.hello.name
        parent = {"traceparent": message.traceparent}
        span = self.service.tracer.begin("text_completion", model, headers=parent)
        try:
            assert streams is not None, "the engine has not started"
            options = {"priority": message.priority, "deadline_s": message.deadline_s, "salt": message.salt}
            async for event in streams.stream(message.prompt, message.params, id=id, **options):  # type: ignore[arg-type]
                tokens += len(event.token_ids)
                reasons += [event.finish_reason] if event.finish_reason is not None else []
                self.send(EventMessage.of(event))
            error = ""
        except Exception as failure:
            error = type(failure).__name__
            if not isinstance(failure, AttarError):
                logger.error("request %s failed", id, exc_info=failure)
            self.send(Refusal.of(id, failure))
        finally:
            del self._requests[id], self.service.owners[id]
            usage = {"input_tokens": len(message.prompt), "output_tokens": tokens}
            span.end(error, usage_attributes(usage, reasons))
            log_request("target", id, tokens=tokens, seconds=round(time.monotonic() - began, 6))

    def _cancel(self, id: str) -> None:
        if id in self._requests:
            self._requests[id].cancel()

    def _offer(self, offer: Offer) -> None:
        receive = self.service.receive
        if receive is not None and offer.request in self.remote and receive(offer) == "wrong":
            self._lost(offer.request)

    def _lost(self, request: int) -> None:
        drafter = self.remote.pop(request, None)
        if drafter is not None:
            drafter.lost = True


def _refused(message: ServiceMessage) -> Refusal | None:
    """In the place of an event that is too large: before the request's last event, which may wait already."""
    if not isinstance(message, EventMessage):
        return None
    return Refusal.of(message.request, too_large("answer", "ask for fewer logprobs"))


class RemoteDrafter:
    """The drafter that a coordinator has chosen for one request."""

    name = "coordinator"

    def __init__(self, owner: CoordinatorStream, request: int) -> None:
        self.owner, self.request, self.lost = owner, request, False
        self.turnaround = owner.turnaround

    @property
    def ready(self) -> bool:
        return not (self.lost or self.owner.closed)

    def send(self, message: ServiceMessage) -> None:
        """Send soon, in order."""
        if isinstance(message, Close):
            self.owner.remote.pop(self.request, None)
        self.owner.send(message)

    def record_verdict(self, drafted: int, accepted: int) -> None:
        self.owner.send(DraftVerdict(self.request, drafted, accepted))
