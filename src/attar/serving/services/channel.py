"""Streams of messages over gRPC: generic handlers, no generated code; one method for each kind of stream.

    Network     a thread with an event loop, in which all streams of a process live
    listen      the open port of a service          connect      a stream to one

Both sides are bounded: bytes of a frame, streams of all and of one host, seconds until the first message, and
for a service between two frames: who uses it pings (``draft_client.py``, ``target_client.py``). A key travels
in the metadata of the stream and is compared in constant time; TLS is on where a certificate is given. The
engine's thread never touches a socket: it leaves messages, and the network's thread sends them.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from attar.errors import DataError, MissingExtraError, OutputError
from attar.serving.services.messages import (
    MOST_BYTES,
    Hello,
    ProtocolError,
    ServiceMessage,
    check_hello,
    decode,
    encode,
)

T = TypeVar("T")

DRAFT, TARGET = "/attar.Draft/Stream", "/attar.Target/Stream"
HELLO_S = 5.0  # seconds for the first message
SILENCE_S = 6.0  # seconds between two frames to a service: after DEAD_S the other side has given up
STREAMS, HOST_STREAMS = 64, 32  # of a service at a time, of them from one host
_OPTIONS = [
    ("grpc.max_receive_message_length", MOST_BYTES),
    ("grpc.max_send_message_length", MOST_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
]
_SERVER_OPTIONS = [
    *_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_connection_idle_ms", 10_000),  # without a stream
    ("grpc.server_handshake_timeout_ms", 5_000),
]


class StreamEnded(Exception):  # noqa: N818
    """The other side, or the network, has ended a stream; the message says why."""


@dataclass(frozen=True)
class Security:
    """Keys and certificates between services.

    Args:
        key: that clients must send, and that this one sends; empty: none.
        cert, cert_key: files of the own certificate; empty: no TLS as a server.
        ca: file of the certificates that servers are checked against; empty: no TLS as a client.
    """

    key: str = ""
    cert: str = ""
    cert_key: str = ""
    ca: str = ""


class FrameStream:
    """Messages on one stream, with either role.

    Args:
        silence: seconds between two frames of the other side at most; None: no limit.

    Attributes:
        most: bytes of a frame.
    """

    most = MOST_BYTES

    def __init__(
        self,
        read: Callable[[], Awaitable[Any]],
        write: Callable[[bytes], Awaitable[None]],
        end: Any,
        silence: float | None = None,
    ) -> None:
        self._read, self._write, self._end, self._silence = read, write, end, silence

    async def read(self) -> list[ServiceMessage]:
        """The messages of the next frame.

        Raises:
            ProtocolError: they break the protocol, or do not come.
            StreamEnded: there are none.
        """
        try:
            frame = await asyncio.wait_for(self._read(), self._silence)
        except TimeoutError:
            raise ProtocolError(f"no message for {self._silence:g} s") from None
        except _grpc().RpcError as error:
            raise StreamEnded(_reason(error)) from None
        if frame is self._end:
            raise StreamEnded("the other side has ended the stream")
        return decode(frame)

    async def write(
        self,
        messages: Sequence[ServiceMessage],
        instead: Callable[[ServiceMessage], ServiceMessage | None] | None = None,
    ) -> list[ServiceMessage]:
        """Send messages, in as many frames as they need; waits while the other side is slow.

        Returns those that are too large for a frame, and were not sent; what ``instead`` gives for one takes
        its place.

        Raises:
            StreamEnded: the stream has ended.
        """
        frames, too_large = encode(messages, self.most, instead)
        try:
            for frame in frames:
                await self._write(frame)
            return too_large
        except (_grpc().RpcError, asyncio.InvalidStateError) as error:
            raise StreamEnded(_reason(error)) from None

    async def handshake(self, hello: Hello, role: str) -> Hello:
        """Send the first message and check the other side's.

        Raises:
            ProtocolError: it does not fit, or does not come.
            StreamEnded: the stream has ended.
        """
        await self.write([hello])
        try:
            messages = await asyncio.wait_for(self.read(), HELLO_S)
        except TimeoutError:
            raise ProtocolError(f"no first message within {HELLO_S:g} s") from None
        return check_hello(messages[0] if len(messages) == 1 else None, role, hello)


async def run_until_first(*work: Coroutine[Any, Any, None]) -> None:
    """Run the directions of a stream together until one of them ends or fails; the others are cancelled."""
    tasks = [asyncio.create_task(direction) for direction in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Network:
    """An event loop in a separate thread."""

    def __init__(self) -> None:
        _grpc()
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(_ignore_blocking)
        self._thread = Thread(target=self.loop.run_forever, name="attar-network", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine in the loop; waits for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def post(self, function: Callable[..., object], *values: object) -> None:
        """Call a function in the loop soon; once it is closed, nothing happens."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *values)

    def close(self) -> None:
        """Cancel what still runs, and end the thread."""
        if self.loop.is_closed():
            return
        self.run(_cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def listen(
    methods: Mapping[str, Callable[[FrameStream], Awaitable[None]]], host: str, port: int, security: Security
) -> tuple[Any, int]:
    """The running server, and its port. A handler that returns or fails ends its stream.

    Raises:
        OutputError: the port cannot be opened.
        DataError: a certificate cannot be read.
    """
    grpc = _grpc()
    server = grpc.aio.server(options=_SERVER_OPTIONS, maximum_concurrent_rpcs=STREAMS)
    server.add_generic_rpc_handlers([_handlers(methods, security.key)])
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if security.cert:
            pair = _file(security.cert_key), _file(security.cert)
            port = server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OutputError(f"cannot listen on {address}", hint="choose another --grpc-port") from error
    if not port:
        raise OutputError(f"cannot listen on {address}", hint="choose another --grpc-port")
    await server.start()
    return server, port


@asynccontextmanager
async def connect(endpoint: str, method: str, security: Security) -> AsyncIterator[FrameStream]:
    """A stream to a service; its own connection, closed at the end."""
    grpc = _grpc()
    options = [*_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    address = endpoint.split("://")[-1].rstrip("/")
    if security.ca:
        credentials = grpc.ssl_channel_credentials(_file(security.ca))
        channel = grpc.aio.secure_channel(address, credentials, options=options)
    else:
        channel = grpc.aio.insecure_channel(address, options=options)
    metadata = [("authorization", f"Bearer {security.key}")] if security.key else []
    async with channel:
        call = channel.stream_stream(method)(metadata=metadata)
        try:
            yield FrameStream(call.read, call.write, grpc.aio.EOF)
        finally:
            call.cancel()


def check_files(security: Security) -> None:
    """Raises DataError for a file that cannot be read, before any work."""
    for path in (security.cert, security.cert_key, security.ca):
        if path:
            _file(path)


def _handlers(methods: Mapping[str, Callable[[FrameStream], Awaitable[None]]], key: str) -> Any:
    grpc, streams = _grpc(), Counter[str]()

    def behaviour(handle: Callable[[FrameStream], Awaitable[None]]) -> Any:
        async def stream(_: object, context: Any) -> None:
            host = context.peer().rpartition(":")[0]
            if streams[host] >= HOST_STREAMS:
                words = f"{HOST_STREAMS} streams come from this host"
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, words)
            streams[host] += 1
            try:
                await handle(FrameStream(context.read, context.write, grpc.aio.EOF, SILENCE_S))
            except ProtocolError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            except StreamEnded:
                return
            finally:
                streams[host] -= 1
                if not streams[host]:
                    del streams[host]

        return stream

    async def refuse(_: object, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the service key is missing or wrong")

    class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc, name-defined]
        def service(self, details: Any) -> Any:
            handle = methods.get(details.method)
            if handle is None:
                return None
            sent = dict(details.invocation_metadata).get("authorization", "")
            valid = hmac.compare_digest(str(sent).encode(), f"Bearer {key}".encode())
            return grpc.stream_stream_rpc_method_handler(behaviour(handle) if valid or not key else refuse)

    return Handlers()


def _file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _reason(error: Any) -> str:
    details = getattr(error, "details", None)
    code = getattr(error, "code", None)
    if not callable(details) or not callable(code):
        return str(error) or type(error).__name__
    return f"{code().name}: {str(details())[:200]}" if code() is not None else "the stream was ended"


def _grpc() -> Any:
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # its own log is read at the import
    try:
        import grpc
        import grpc.aio
    except ImportError:
        raise MissingExtraError("grpc", "services") from None
    return grpc


def _ignore_blocking(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """gRPC's poller logs a harmless BlockingIOError where a process has several event loops."""
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
