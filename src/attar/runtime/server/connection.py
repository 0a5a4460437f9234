"""Connections that end: none stays open without a request that is complete and an answer that is read.

uvicorn's HTTP/1.1 protocol with what it has no clock for. A request's headers and its body have a time to
come in, each piece of an answer has a time to be taken, and connections have a number. Above it a connection
that has asked for nothing yet makes room for the newest, so whoever holds half-open connections loses them
and nobody else is turned away.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from attar.runtime.server.api_keys import client_address
from attar.runtime.server.settings import ServerSettings

_LATE = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_FULL = _LATE.replace(b"408 Request Timeout", b"503 Service Unavailable\r\nRetry-After: 1")
_SPARE = 128  # open files besides connections
_QUIET_S = 10.0


class Connections:
    """All connections of a server.

    Args:
        settings: their number and times.
        most: connections at a time; None: as the settings say.
    """

    def __init__(self, settings: ServerSettings, most: int | None = None) -> None:
        self.settings = settings
        self.most = most or settings.max_connections
        self.most_each = max(1, int(settings.share * self.most))
        self.idle: dict[Connection, None] = {}  # without a whole request, the oldest first
        self._each: Counter[str] = Counter()

    def enter(self, connection: Connection) -> bool:
        """Whether a new connection may stay; an idle one may have to go for it."""
        self._each[connection.address] += 1
        self.idle[connection] = None
        if self._each[connection.address] > self.most_each:
            return self._make_room(connection, connection.address)
        return self._each.total() <= self.most or self._make_room(connection, None)

    def leave(self, connection: Connection) -> None:
        """It is closed."""
        self.idle.pop(connection, None)
        self._each[connection.address] -= 1
        if not self._each[connection.address]:
            del self._each[connection.address]

    def _make_room(self, newest: Connection, address: str | None) -> bool:
        """Close the oldest idle connection, of an address or of any."""
        for oldest in self.idle:
            if oldest is newest:
                return False
            if address in (None, oldest.address):
                del self.idle[oldest]  # it is no candidate any more; it leaves when the loop has closed it
                oldest.transport.abort()
                return True
        return False


class Connection(H11Protocol):
    """One connection.

    Args:
        crowd: all of them.
        options: of uvicorn.
    """

    def __init__(self, crowd: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._crowd, self._settings, self.address = crowd, crowd.settings, ""
        self._phase: object = None  # what is waited for: h11.IDLE headers, h11.SEND_BODY a body
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # pause_writing: a piece is not taken at once
        self.address = client_address(self.client)
        if self._crowd.enter(self):
            self._wait_for(h11.IDLE)
        else:
            self._close_with(_FULL)

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.leave(self)
        self._wait_for(None)
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look(came=True)

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which may begin the next request
        if not self.transport.is_closing():
            self._crowd.idle[self] = None
            self._look(came=False)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._settings.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def _look(self, came: bool) -> None:
        """What must come next: headers once their first byte ``came``, a body, or nothing."""
        state = self.conn.their_state
        if state is h11.IDLE and not came:
            self._wait_for(None)  # uvicorn has a clock for what idles between two requests
        elif state not in (h11.IDLE, h11.SEND_BODY):
            self._crowd.idle.pop(self, None)
            self._wait_for(None)
        elif state is not self._phase:
            self._wait_for(state)

    def _wait_for(self, phase: object) -> None:
        """Something must come in time; None: nothing."""
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None
        self._phase = phase
        if phase is not None:
            seconds = self._settings.header_s if phase is h11.IDLE else self._settings.body_s
            self._read_timer = self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self._close_with(_LATE)
        else:
            self.transport.abort()

    def _close_with(self, answer: bytes) -> None:
        self.transport.write(answer)
        self.transport.close()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def raise_file_limit(connections: int) -> int:
    """Let the process open so many connections, if it may; how many it can open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _SPARE
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, soft - _SPARE)


class RepeatFilter(logging.Filter):
    """Lets the same message through once in ten seconds: a client must not fill the disk with the log."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        kind = record.exc_info[0] if record.exc_info else None
        now, message = time.monotonic(), f"{record.msg} {kind}"
        if now - self._seen.get(message, -_QUIET_S) < _QUIET_S:
            return False
        self._seen = {key: then for key, then in self._seen.items() if now - then < _QUIET_S}
        self._seen[message] = now
        return True


def log_loop_error(loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    """An exception handler of asyncio's loops in one line, which ``RepeatFilter`` counts as the same."""
    del loop
    error = context.get("exception")
    message = str(context.get("message", "error")).replace("%", "%%")
    logging.getLogger("uvicorn.error").error(f"{message}: %r", error)
