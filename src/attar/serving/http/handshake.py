"""A TLS connection until its handshake is done: counted and timed as one that waits for headers.

asyncio's own TLS server calls its protocol after the handshake only; a silent client would hold an open file
that nobody counts.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from ssl import SSLContext
from typing import Any

from uvicorn.protocols.utils import get_remote_addr

from attar.serving.http.api_keys import client_address
from attar.serving.http.connection import Connection, Connections


class Handshake(asyncio.Protocol):
    """The protocol of an accepted socket, which hands it over to a :class:`Connection`.

    Args:
        options: of the connection.
    """

    def __init__(self, connections: Connections, context: SSLContext, **options: Any) -> None:
        self._all, self._context, self._options = connections, context, options
        self._server_state, self._early = options["server_state"], b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The socket was accepted."""
        transport.pause_reading()
        self.transport, self.address = transport, client_address(get_remote_addr(transport))
        self._server_state.connections.add(self)
        self._task = asyncio.get_running_loop().create_task(self._run(self._all.add(self)))

    def data_received(self, data: bytes) -> None:
        """Decrypted bytes that came with the end of the handshake."""
        self._early += data

    def shutdown(self) -> None:
        """The server ends."""
        self.transport.abort()

    async def _run(self, admitted: bool) -> None:
        secured: asyncio.Transport | None = None
        try:
            if admitted and not self.transport.is_closing():
                with suppress(OSError):  # of TLS too
                    secured = await self._start_tls()
        finally:
            self._all.remove(self)
            self._server_state.connections.discard(self)
        if secured is None or secured.is_closing():
            self.transport.abort()
            return
        connection = Connection(self._all, **self._options)
        secured.set_protocol(connection)
        connection.connection_made(secured)
        if self._early:
            connection.data_received(self._early)

    async def _start_tls(self) -> asyncio.Transport | None:
        """The transport of the text; None: the client has left."""
        seconds = self._all.settings.header_s
        return await asyncio.get_running_loop().start_tls(
            self.transport,
            self,
            self._context,
            server_side=True,
            ssl_handshake_timeout=seconds,
            ssl_shutdown_timeout=seconds,
        )
