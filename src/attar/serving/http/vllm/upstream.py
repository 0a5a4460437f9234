"""Requests to a server on a unix socket, one for each connection; answers come as they are written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import h11

PIECE = 1 << 16  # bytes
Headers = Sequence[tuple[bytes, bytes]]


@dataclass
class UpstreamAnswer:
    """The beginning of an answer.

    Attributes:
        body: the rest, in pieces as they come.
    """

    status: int
    headers: Headers
    body: AsyncIterator[bytes]
    writer: asyncio.StreamWriter

    def close(self) -> None:
        """The server sees that nobody reads, and ends its work."""
        self.writer.close()


async def send(
    socket: str, method: str, target: str, headers: Headers = (), body: bytes = b""
) -> UpstreamAnswer:
    """Send a request, and wait for the beginning of its answer.

    Raises:
        OSError: there is no server.
        h11.RemoteProtocolError: it does not speak HTTP, or ends before its answer.
    """
    reader, writer = await asyncio.open_unix_connection(socket)
    connection = h11.Connection(h11.CLIENT)
    sized = [(b"host", b"localhost"), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    request = h11.Request(method=method, target=target, headers=[*sized, *headers])
    try:
        for event in (request, h11.Data(data=body), h11.EndOfMessage()):
            writer.write(connection.send(event) or b"")
        response = await _next(connection, reader)
        while not isinstance(response, h11.Response):  # 100 Continue
            response = await _next(connection, reader)
    except BaseException:
        writer.close()
        raise
    return UpstreamAnswer(response.status_code, list(response.headers), _pieces(connection, reader), writer)


async def get(socket: str, path: str) -> int:
    """The status of a page; 0: nobody answers."""
    try:
        answer = await send(socket, "GET", path)
    except (OSError, h11.RemoteProtocolError):
        return 0
    answer.close()
    return answer.status


async def _pieces(connection: h11.Connection, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while isinstance(event := await _next(connection, reader), h11.Data):
        yield bytes(event.data)


async def _next(connection: h11.Connection, reader: asyncio.StreamReader) -> Any:
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await reader.read(PIECE))
    if event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
        raise h11.RemoteProtocolError("the server has closed the connection")
    return event
