"""Checks before a body is parsed: host, API key, size; and the answer to unexpected errors. Plain ASGI.

A body is counted as it arrives, whatever its header says; one that is too large is answered with 413. The
rest of it is read and dropped for a while, because a client that is cut off while it sends does not read the
answer. ``/health``, ``/ready`` and the page need no key.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Collection, MutableMapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from attar.serving.http.api_keys import ApiKey, client_address
from attar.serving.http.error_forms import error_response
from attar.serving.http.errors import ApiError
from attar.serving.http.settings import ServerSettings

ASGIScope = MutableMapping[str, Any]
ASGIMessage = MutableMapping[str, Any]
ASGIReceive = Callable[[], Awaitable[ASGIMessage]]
ASGISend = Callable[[ASGIMessage], Awaitable[None]]
ASGIApp = Callable[[ASGIScope, ASGIReceive, ASGISend], Awaitable[None]]
LOGGER = "attar.server"
OPEN_PATHS = ("/", "/health", "/ready")
MAX_DROPPED = 64 << 20  # bytes read of a body that is too large
MAX_DROPPED_S = 10.0
CONCURRENT_BODIES = 128  # of the largest size, that requests may hold at the same time


class UnexpectedErrorMiddleware:
    """Answers an unexpected error with 500, and logs it.

    uvicorn would close the connection instead. That cuts off the answer while a body is still arriving, and
    behind a proxy it may hit another client's request.

    Args:
        error_for: the answer to an error.
    """

    def __init__(self, app: ASGIApp, error_for: Callable[[Exception], ApiError]) -> None:
        self._app, self._error_for = app, error_for

    async def __call__(self, scope: ASGIScope, receive: ASGIReceive, send: ASGISend) -> None:
        started = scope["type"] != "http"

        async def send_and_record(message: ASGIMessage) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_record)
        except Exception as error:
            if started:
                raise
            logging.getLogger(LOGGER).error("a request failed", exc_info=error)
            await error_response(self._error_for(error), scope)(scope, receive, send)


class RequestMiddleware:
    """Checks a request before its body is read, and holds the models that it uses until its response has been
    sent.

    Args:
        checks: each of them returns the error of a request that is refused, else None.
    """

    def __init__(self, app: ASGIApp, checks: Sequence[Callable[[ASGIScope], ApiError | None]]) -> None:
        self._app, self._checks = app, checks

    async def __call__(self, scope: ASGIScope, receive: ASGIReceive, send: ASGISend) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        for check in self._checks:
            if (error := check(scope)) is not None:
                return await error_response(error, scope)(scope, receive, send)
        with ExitStack() as leases:
            scope["state"]["leases"] = leases
            return await self._app(scope, receive, send)


def check_host(scope: ASGIScope, allowed: Collection[str], origins: Collection[str] = ()) -> ApiError | None:
    """Refuses requests from web pages of other hosts (DNS rebinding): browsers send Host and Origin.

    Args:
        allowed: host names; none: any.
        origins: of pages that may call the server besides; ``*``: all.
    """
    if not allowed:
        return None
    headers = Headers(scope=scope)
    for name, status in (("host", 421), ("origin", 403)):
        value = headers.get(name)
        if name == "origin" and ("*" in origins or value in origins):
            continue
        if value is not None and _host_name(value) not in allowed:
            message = f"the {name} {value[:200]!r} is not one of this server's; see --allowed-host"
            return ApiError(status, message, code=f"{name}_not_allowed")
    return None


def allowed_hosts(settings: ServerSettings) -> frozenset[str]:
    """Host names that requests may use: without a key on loopback, the server's own; else any."""
    named = {name.lower() for name in settings.allowed_host}
    if not named and (settings.api_key or settings.keys or not settings.loopback):
        return frozenset()
    return frozenset({"localhost", "127.0.0.1", "::1", settings.host.lower(), *named})


def _host_name(header: str) -> str | None:
    """The host name in a Host or Origin header, without the port."""
    try:
        parts = urlsplit(header if "://" in header else f"//{header}")
        return None if "@" in header else parts.hostname
    except ValueError:
        return None


def check_key(scope: ASGIScope, keys: Sequence[ApiKey]) -> ApiError | None:
    """Checks the API key, and sets ``scope["state"]["caller"]``; each key is a tenant with its own prefixes.

    Args:
        keys: the valid ones; none: no key is needed, and every address is a caller.
    """
    caller = ApiKey(name=client_address(scope.get("client")))
    if keys and scope["path"] not in OPEN_PATHS:
        sent = _sent_key(Headers(scope=scope)).encode("latin-1", "replace")
        # every key is compared, so that the time reveals nothing
        matches = [key for key in keys if hmac.compare_digest(sent, key.key.encode())]
        if not matches:
            message = "Incorrect API key provided." if sent else "You didn't provide an API key."
            return ApiError(401, message, code="invalid_api_key")
        caller = matches[0]
        scope["state"]["log_fields"]["key"] = caller.name
    scope["state"]["caller"] = caller
    return None


def _sent_key(headers: Headers) -> str:
    """The key of a request: the bearer's; without one, that of Anthropic's header ``x-api-key``."""
    kind, _, value = headers.get("authorization", "").partition(" ")
    return (value if kind.lower() == "bearer" else headers.get("x-api-key", "")).strip()


class BodyLimitMiddleware:
    """Refuses bodies above a size, and bodies that together would need too much memory."""

    def __init__(self, app: ASGIApp, max_body: int) -> None:
        self._app, self._max_body, self._max_held = app, max_body, CONCURRENT_BODIES * max_body
        self._held = 0  # bytes of bodies whose requests are running

    async def __call__(self, scope: ASGIScope, receive: ASGIReceive, send: ASGISend) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        declared = Headers(scope=scope).get("content-length", "0")
        too_large = ApiError(413, f"the body is larger than {self._max_body:,} bytes", code="body_too_large")
        if declared.isdecimal() and int(declared[:20]) > self._max_body:
            if "expect" not in Headers(scope=scope):  # else the client waits for an answer before it sends
                await _drop_body(receive)
            return await error_response(too_large, scope)(scope, receive, send)
        received = 0

        async def receive_and_count() -> ASGIMessage:
            nonlocal received
            message = await receive()
            size = len(message.get("body", b""))
            received, self._held = received + size, self._held + size
            if received > self._max_body:
                if message.get("more_body"):
                    await _drop_body(receive)
                raise too_large
            if size and self._held > self._max_held:
                raise ApiError(503, "too many large bodies at a time", code="busy", retry_s=1)
            return message

        try:
            return await self._app(scope, receive_and_count, send)
        finally:
            self._held -= received


async def _drop_body(receive: ASGIReceive) -> None:
    """Read the rest of a body, within bounds."""
    remaining = MAX_DROPPED
    with suppress(TimeoutError):
        async with asyncio.timeout(MAX_DROPPED_S):
            while remaining > 0:
                message = await receive()
                remaining -= len(message.get("body", b""))
                if not message.get("more_body"):
                    return
