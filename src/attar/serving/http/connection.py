"""uvicorn's HTTP/1.1 protocol with more timeouts, and a limit on the number of connections.

Headers and bodies must arrive in time, and clients must read their answers in time. Above the limit a new
connection replaces the oldest one without a complete request, so an attacker's half-open connections do not
keep others out.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from attar.printable import PrintableFormatter
from attar.serving.http.api_keys import client_address
from attar.serving.http.settings import ServerSettings

_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_FULL = _TIMEOUT.replace(b"408 Request Timeout", b"503 Service Unavailable\r\nRetry-After: 1")
_SPARE_FILES = 128  # open files that are not connections
_REPEAT_S = 10.0
_TRACEBACK, _LINE = 40, 400  # lines of a traceback in the log, and characters of each


class OpenConnection(Protocol):
    """A connection, or one that has not got so far."""

    address: str
    transport: asyncio.Transport


class Connections:
    """All connections of a server.

    Args:
        limit: connections at a time; None: the settings'.
    """

    def __init__(self, settings: ServerSettings, limit: int | None = None) -> None:
        self.settings = settings
        self.limit = limit or settings.max_connections
        self.limit_per_address = max(1, int(settings.share * self.limit))
        self.idle: dict[OpenConnection, None] = {}  # without a complete request, the oldest first
        self._by_address: Counter[str] = Counter()

    def add(self, connection: OpenConnection) -> bool:
        """Whether a new connection may stay; an idle one may be closed for it."""
        self._by_address[connection.address] += 1
        self.idle[connection] = None
        if self._by_address[connection.address] > self.limit_per_address:
            return self._make_room(connection, connection.address)
        return self._by_address.total() <= self.limit or self._make_room(connection, None)

    def remove(self, connection: OpenConnection) -> None:
        """Count a closed connection."""
        self.idle.pop(connection, None)
        self._by_address[connection.address] -= 1
        if not self._by_address[connection.address]:
            del self._by_address[connection.address]

    def _make_room(self, newest: OpenConnection, address: str | None) -> bool:
        """Close the oldest idle connection, of an address or of any."""
        for oldest in self.idle:
            if oldest is newest:
                return False
            if address in (None, oldest.address):
                del self.idle[oldest]  # no candidate any more; the loop calls remove() when it has closed it
                oldest.transport.abort()
                return True
        return False


class Connection(H11Protocol):
    """One connection."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._all, self._settings, self.address = connections, connections.settings, ""
        self._phase: object = None  # h11.IDLE: waits for headers, h11.SEND_BODY: for a body
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # pause_writing is called for each piece that is not read at once: plain transports pause above the
        # limit, those of TLS at it
        transport.set_write_buffer_limits(high=int(transport.get_extra_info("sslcontext") is not None))
        self.address = client_address(self.client)
        if self._all.add(self):
            self._wait_for(h11.IDLE)
        else:
            self._close_with(_FULL)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.remove(self)
        self._wait_for(None)
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_timer(received=True)

    def handle_events(self) -> None:
        super().handle_events()
        names = {name for name, _ in self.headers or ()}
        if {b"content-length", b"transfer-encoding"} <= names and self.cycle is not None:
            self.cycle.keep_alive = False  # a proxy may see another end of this body: RFC 9112, 6.3

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which may begin the next request
        if not self.transport.is_closing():
            self._all.idle[self] = None
            self._update_timer(received=False)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._settings.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def _update_timer(self, received: bool) -> None:
        """Start the timer of what comes next: headers after their first byte, a body, or nothing."""
        state = self.conn.their_state
        if state is h11.IDLE and not received:
            self._wait_for(None)  # uvicorn has a timeout for idle connections between two requests
        elif state not in (h11.IDLE, h11.SEND_BODY):
            self._all.idle.pop(self, None)
            self._wait_for(None)
        elif state is not self._phase:
            self._wait_for(state)

    def _wait_for(self, phase: object) -> None:
        """Start the timer of a phase; None: no timer."""
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None
        self._phase = phase
        if phase is not None:
            seconds = self._settings.header_s if phase is h11.IDLE else self._settings.body_s
            self._read_timer = self.loop.call_later(seconds, self._on_timeout)

    def _on_timeout(self) -> None:
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self._close_with(_TIMEOUT)
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
    """Raise the limit of open files for a number of connections; returns how many the process can open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return connections
    soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, soft - _SPARE_FILES)


class ShortTracebacks(PrintableFormatter):
    """The first and the last lines of a traceback: one of a recursion has thousands."""

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """See logging."""
        lines = super().formatException(ei).splitlines()
        if len(lines) > _TRACEBACK:
            left_out = f"  ... {len(lines) - _TRACEBACK} lines ..."
            lines = [*lines[:10], left_out, *lines[10 - _TRACEBACK :]]
        return "\n".join(line[:_LINE] for line in lines)


class RepeatFilter(logging.Filter):
    """Logs the same message once in ten seconds, so that a client cannot fill the disk; lines that are no
    warnings always."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        if record.levelno < logging.WARNING:
            return True
        kind = record.exc_info[0] if record.exc_info else None
        now, message = time.monotonic(), f"{record.msg} {kind}"
        if now - self._seen.get(message, -_REPEAT_S) < _REPEAT_S:
            return False
        self._seen = {key: time for key, time in self._seen.items() if now - time < _REPEAT_S}
        self._seen[message] = now
        return True


def log_loop_error(loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    """asyncio's exception handler, in one line that ``RepeatFilter`` recognizes as repeated."""
    del loop
    error = context.get("exception")
    message = str(context.get("message", "error")).replace("%", "%%")
    logging.getLogger("uvicorn.error").error(f"{message}: %r", error)
