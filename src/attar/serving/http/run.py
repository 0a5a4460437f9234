"""Listen, serve, and shut down gracefully.

SIGTERM or SIGINT     /ready returns 503, new requests get 503, active ones have ``drain_s`` seconds
the second signal     active requests end at once with 503, as they do after ``drain_s``
the third signal      the process ends without answers
the engine stopped    every request gets 503 for a few seconds, then the process ends with an error

The port stays open while the server drains, so new clients get 503 and can go elsewhere.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from attar.errors import AttarError, OutputError
from attar.serving.http.admission_control import AdmissionControl
from attar.serving.http.connection import (
    Connection,
    Connections,
    RepeatFilter,
    ShortTracebacks,
    log_loop_error,
    raise_file_limit,
)
from attar.serving.http.handshake import Handshake
from attar.serving.http.middleware import LOGGER
from attar.serving.http.model_table import ModelTable
from attar.serving.http.settings import ServerSettings
from attar.serving.http.transport import BACKLOG, ConnectionSettings, listen_on_unix

_ACCEPT_BATCH = 32  # of them accepted before the loop does anything else
_GRACE_S = 1  # for the last answers
_STOPPED_S = 3.0  # in which a server whose engine has stopped still answers


class Server(uvicorn.Server):
    """uvicorn's server, which drains before it stops listening, and does not raise the signal again.

    Args:
        settings: ``drain_s`` and the limits of connections.
        transport: TLS.
    """

    def __init__(
        self, app: FastAPI, settings: ServerSettings, transport: ConnectionSettings | None = None
    ) -> None:
        connections = Connections(settings, raise_file_limit(settings.max_connections))
        tls = transport.ssl_context() if transport is not None else None
        protocol = partial(Handshake, connections, tls) if tls else partial(Connection, connections)
        config = uvicorn.Config(
            app,
            http=protocol,  # type: ignore[arg-type]
            ws="none",
            backlog=_ACCEPT_BATCH,
            timeout_keep_alive=math.ceil(settings.idle_s),
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
        super().__init__(config)
        self.connections = connections
        self._models: ModelTable = app.state.models
        self._admission: AdmissionControl = self._models.first.admission
        self._drain_s, self._drain_end = settings.drain_s, 0.0
        self._stopped_since: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first drains, the second ends requests, the third ends the process."""
        if self.should_exit:
            self.force_exit = True
        elif self._admission.draining:
            self._drain_end = 0.0
        else:
            self._admission.draining, self._drain_end = True, time.monotonic() + self._drain_s

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; returns whether to exit."""
        if self._models.failure is not None and not self._admission.draining:
            self._models.failure_reason()  # logs it
            self._stopped_since = self._stopped_since or time.monotonic()
            self.should_exit = self.should_exit or time.monotonic() - self._stopped_since > _STOPPED_S
        if self._admission.draining and (not self._admission.active or time.monotonic() >= self._drain_end):
            self._admission.shut_down()
            self.should_exit = True
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """asyncio takes one number for the backlog and for the batch of accepted connections; set both."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the application even where uvicorn would skip it for lack of time."""
        self._admission.shut_down()
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()


def run(
    app: FastAPI,
    settings: ServerSettings,
    show: Callable[[str], None],
    transport: ConnectionSettings | None = None,
    bound: socket.socket | None = None,
) -> None:
    """Serve until a signal arrives.

    Args:
        bound: the port, from :func:`bind`; None: it is taken now.
        show: called with the address once the port is open, and with warnings.

    Raises:
        OutputError: the port or socket is in use, or the address is not this machine's.
        AttarError: the engine has stopped.
    """
    transport = transport or ConnectionSettings()
    listening = listen(settings, bound)
    _log_to_stderr()
    server = Server(app, settings, transport)
    if server.connections.limit < settings.max_connections:
        limit = server.connections.limit
        show(f"warning: {limit} connections at most: the process may not open more files")
    show(_address(settings, transport, listening))
    gc.collect()
    gc.freeze()  # the model's objects stay; scanning them would take a third of a second
    try:
        asyncio.run(_serve(server, listening))
    finally:
        listening.close()
        if settings.unix_socket:
            Path(settings.unix_socket).unlink(missing_ok=True)
    if app.state.models.failure is not None:
        reason = app.state.models.failure_reason()
        raise AttarError(f"the engine has stopped: {reason}", hint="the log has the reason; start it again")


async def _serve(server: Server, listening: socket.socket) -> None:
    asyncio.get_running_loop().set_exception_handler(log_loop_error)
    await server.serve([listening])


def _address(settings: ServerSettings, transport: ConnectionSettings, listening: socket.socket) -> str:
    if settings.unix_socket:
        return f"unix:{settings.unix_socket}"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    scheme = "https" if transport.tls_cert else "http"
    return f"{scheme}://{host}:{listening.getsockname()[1]}"


def bind(settings: ServerSettings) -> socket.socket | None:
    """The port, taken before a model is loaded; nobody can connect yet. None for a unix socket.

    Raises:
        OutputError: the port is in use, or the address is not this machine's.
    """
    if settings.unix_socket:
        return None
    bound = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        with _explained(settings):
            bound.bind((settings.host, settings.port))
    except OutputError:
        bound.close()
        raise
    return bound


def listen(settings: ServerSettings, bound: socket.socket | None = None) -> socket.socket:
    """The open port, or unix socket.

    Args:
        bound: from :func:`bind`.

    Raises:
        OutputError: the port or socket is in use, or the address is not this machine's.
    """
    listening = bound or bind(settings)
    if listening is None:
        return listen_on_unix(settings.unix_socket)
    with _explained(settings):
        listening.listen(BACKLOG)
    return listening


@contextmanager
def _explained(settings: ServerSettings) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(
            f"cannot listen on {settings.host}:{settings.port}: {reason}", hint="choose another --port"
        ) from error


def _log_to_stderr() -> None:
    """Log a line per request as it is, and warnings, each once in a while."""
    handler = logging.StreamHandler()
    for name, level in (
        (LOGGER, logging.INFO),
        ("uvicorn", logging.WARNING),
        ("opentelemetry", logging.WARNING),
    ):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    for writer in (handler, *logging.getLogger("attar").handlers):
        writer.setFormatter(ShortTracebacks())
        writer.filters[:] = [RepeatFilter()]
