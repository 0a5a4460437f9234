"""Listen, serve, and go down gracefully.

SIGTERM or SIGINT   /ready turns 503, new requests get 503, those inside have ``drain_s`` seconds
the second one      those inside are given up at once, as they are when the seconds are over
the third one       nobody is told anything any more
the engine is dead  all are told so for a few seconds, then the process ends with an error

The port stays open while the server drains, so whoever still comes is told to go elsewhere.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import socket
import time
from collections.abc import Callable
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI

from attar.errors import AttarError, OutputError
from attar.runtime.server.access_log import LOGGER
from attar.runtime.server.admission_control import AdmissionControl
from attar.runtime.server.connection import (
    Connection,
    Connections,
    RepeatFilter,
    log_loop_error,
    raise_file_limit,
)
from attar.runtime.server.service import Service
from attar.runtime.server.settings import ServerSettings

_QUEUE = 1024  # connections that wait to be accepted; beyond, a client's kernel asks again after a second
_AT_ONCE = 32  # of them accepted before the loop does anything else
_LAST_S = 1  # for those that were given up to be told
_DEAD_S = 3.0  # in which a server whose engine is dead says so


class Server(uvicorn.Server):
    """uvicorn's, which stops listening when all are out, and does not raise the signal again.

    Args:
        app: made by ``create_app``.
        settings: ``drain_s``.
    """

    def __init__(self, app: FastAPI, settings: ServerSettings) -> None:
        connections = Connections(settings, raise_file_limit(settings.max_connections))
        config = uvicorn.Config(
            app,
            http=partial(Connection, connections),  # type: ignore[arg-type]
            ws="none",
            backlog=_AT_ONCE,
            timeout_keep_alive=math.ceil(settings.idle_s),
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_LAST_S,
        )
        super().__init__(config)
        self.connections = connections
        self._gate: AdmissionControl = app.state.service.gate
        self._service: Service = app.state.service
        self._drain_s, self._until = settings.drain_s, 0.0
        self._dead_since: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: once to drain, twice to give up, three times to end."""
        if self.should_exit:
            self.force_exit = True
        elif self._gate.draining:
            self._until = 0.0
        else:
            self._gate.draining, self._until = True, time.monotonic() + self._drain_s

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to go down now."""
        if self._service.backend.failure is not None and not self._gate.draining:
            self._service.why_stopped()  # into the log
            self._dead_since = self._dead_since or time.monotonic()
            self.should_exit = self.should_exit or time.monotonic() - self._dead_since > _DEAD_S
        if self._gate.draining and (not self._gate.active or time.monotonic() >= self._until):
            self._gate.give_up()
            self.should_exit = True
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Asyncio has one number for the queue and for what it accepts at once; the queue is longer."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_QUEUE)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """The application ends also where uvicorn would leave it for want of time."""
        self._gate.give_up()
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()


def run(app: FastAPI, settings: ServerSettings, told: Callable[[str], None]) -> None:
    """Serve until a signal comes.

    Args:
        told: is given the address once the port is open.

    Raises:
        OutputError: the port is taken, or the address is not this machine's.
        AttarError: the engine has stopped.
    """
    listening = listen(settings)
    _log_to_stderr()
    server = Server(app, settings)
    if server.connections.most < settings.max_connections:
        told(f"warning: {server.connections.most} connections at most: the process may not open more files")
    shown = f"[{settings.host}]" if ":" in settings.host else settings.host
    told(f"http://{shown}:{listening.getsockname()[1]}")
    gc.collect()
    gc.freeze()  # what the model is made of stays, and looking through it takes a third of a second
    try:
        asyncio.run(_serve(server, listening))
    finally:
        listening.close()
    failure = app.state.service.backend.failure
    if failure is not None:
        reason = app.state.service.why_stopped()
        raise AttarError(f"the engine has stopped: {reason}", hint="the log has the reason; start it again")


async def _serve(server: Server, listening: socket.socket) -> None:
    asyncio.get_running_loop().set_exception_handler(log_loop_error)
    await server.serve([listening])


def listen(settings: ServerSettings) -> socket.socket:
    """The open port.

    Raises:
        OutputError: the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((settings.host, settings.port))
        made.listen(_QUEUE)
    except OSError as error:
        made.close()
        reason = error.strerror or str(error)
        raise OutputError(
            f"cannot listen on {settings.host}:{settings.port}: {reason}", hint="choose another --port"
        ) from error
    return made


def _log_to_stderr() -> None:
    """One line for each request, as it is; uvicorn's own warnings too."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    noise = RepeatFilter()
    for name, level in ((LOGGER, logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    logging.getLogger("uvicorn.error").filters[:] = [noise]
