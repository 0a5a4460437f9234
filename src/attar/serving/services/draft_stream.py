"""One verifier's stream at a draft service: messages in, offers out.

Only the newest offer of each request waits to be sent, so what waits is bounded by the open requests. While
the service has many frames to read, the stream is not read: gRPC's flow control then slows the sender down.
"""

from __future__ import annotations

import asyncio
from threading import Lock

from attar.serving.services.channel import FrameStream, run_until_first
from attar.serving.services.draft_service import DraftService
from attar.serving.services.messages import Close, Commit, Hello, Offer, Open, Ping, Pong, ProtocolError

MOST_FRAMES = 256  # that wait for the thread that drafts, of all streams
MOST_PONGS = 16


class VerifierStream:
    """The offers of one stream, for the thread that drafts."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._wake = loop, asyncio.Event()
        self._lock = Lock()
        self._offers: dict[int, Offer] = {}
        self._pongs: list[Pong] = []

    def offer(self, offer: Offer) -> None:
        """Send an offer soon, in place of an older one of its request."""
        with self._lock:
            self._offers[offer.request] = offer
        self._notify()

    def pong(self, pong: Pong) -> None:
        """Send an answer soon."""
        with self._lock:
            self._pongs = [*self._pongs[-MOST_PONGS:], pong]
        self._notify()

    async def send(self, stream: FrameStream) -> None:
        """Send what waits, for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            with self._lock:
                messages: list[Offer | Pong] = [*self._pongs, *self._offers.values()]
                self._pongs, self._offers = [], {}
            if messages:
                await stream.write(messages)

    def _notify(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:  # the loop is closed
            return


async def serve_drafts(stream: FrameStream, service: DraftService, hello: Hello) -> None:
    """Serve one verifier until it leaves.

    Raises:
        ProtocolError: it breaks the protocol.
        StreamEnded: it has left.
    """
    await stream.handshake(hello, "target")
    verifier = VerifierStream(asyncio.get_running_loop())
    try:
        await run_until_first(verifier.send(stream), _read(stream, service, verifier))
    finally:
        service.leave(verifier)


async def _read(stream: FrameStream, service: DraftService, verifier: VerifierStream) -> None:
    """Receive messages, for ever."""
    while True:
        messages = await stream.read()
        if not all(isinstance(message, Open | Commit | Close | Ping) for message in messages):
            raise ProtocolError("a drafter reads open, commit, close and ping")
        while service.waiting > MOST_FRAMES:
            await asyncio.sleep(0.002)
        service.receive(verifier, messages)
