"""What is checked before a body is read: host, key and size. Plain ASGI: streams pass through untouched.

A body is counted as it comes in, whatever its header says; one that is too large is answered with 413. What
is left of it is read and dropped for a while, for a client that is cut off while it sends does not see the
answer. ``/health`` and ``/ready`` need no key.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Collection, MutableMapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from attar.runtime.server.api_keys import ApiKey, client_address
from attar.runtime.server.errors import ApiError
from attar.runtime.server.settings import ServerSettings

ASGIScope = MutableMapping[str, Any]
ASGIMessage = MutableMapping[str, Any]
ASGIReceive = Callable[[], Awaitable[ASGIMessage]]
ASGISend = Callable[[ASGIMessage], Awaitable[None]]
ASGIApp = Callable[[ASGIScope, ASGIReceive, ASGISend], Awaitable[None]]
OPEN = ("/health", "/ready")
DROPPED = 64 << 20  # bytes of a body that is too large, read at most
DROPPED_S = 10.0  # seconds at most
TOGETHER = 128  # of the largest bodies, what requests may hold together


class HostMiddleware:
    """Lets no web page of another host in: a browser tells which name it looked up, and which page asks.

    Args:
        app: what is behind.
        allowed: names; none: any.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app, self._allowed = app, allowed

    async def __call__(self, scope: ASGIScope, receive: ASGIReceive, send: ASGISend) -> None:
        if scope["type"] == "http" and self._allowed:
            headers = Headers(scope=scope)
            for name, status in (("host", 421), ("origin", 403)):
                given = headers.get(name)
                if given is not None and _host(given) not in self._allowed:
                    message = f"the {name} {given[:200]!r} is not one of this server's; see --allowed-host"
                    refusal = ApiError(status, message, code=f"{name}_not_allowed")
                    return await error_response(refusal)(scope, receive, send)
        return await self._app(scope, receive, send)


def allowed_hosts(settings: ServerSettings) -> frozenset[str]:
    """Names that requests may be for: of a server that asks for no key and listens on loopback, its own."""
    named = {name.lower() for name in settings.allowed_host}
    if not named and (settings.api_key or settings.keys or not settings.loopback):
        return frozenset()
    return frozenset({"localhost", "127.0.0.1", "::1", settings.host.lower(), *named})


def _host(given: str) -> str | None:
    """The name in a Host or an Origin, without the port."""
    try:
        parts = urlsplit(given if "://" in given else f"//{given}")
        return None if "@" in given else parts.hostname
    except ValueError:
        return None


class ApiKeyMiddleware:
    """Lets only those in who know a key, and tells who calls.

    Each key is a tenant, whose prefixes nobody else's requests find.

    Args:
        app: what is behind.
        keys: any of them will do; none: everybody may come, and every address is a caller.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey]) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: ASGIScope, receive: ASGIReceive, send: ASGISend) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        caller: ApiKey | None = ApiKey(name=client_address(scope.get("client")))
        if self._keys and scope["path"] not in OPEN:
            sent = Headers(scope=scope).get("authorization", "")
            kind, _, key = sent.partition(" ")
            given = key.strip().encode("latin-1", "replace") if kind.lower() == "bearer" else b""
            # every key is compared, so that the time tells nothing
            matches = [each for each in self._keys if hmac.compare_digest(given, each.key.encode())]
            caller = matches[0] if matches else None
            if caller is None:
                message = "Incorrect API key provided." if given else "You didn't provide an API key."
                refusal = ApiError(401, message, code="invalid_api_key")
                return await error_response(refusal)(scope, receive, send)
            scope.setdefault("state", {}).setdefault("facts", {})["key"] = caller.name
        scope.setdefault("state", {})["caller"] = caller
        return await self._app(scope, receive, send)


class BodyLimitMiddleware:
    """Refuses bodies above a size, and bodies that together would need too much memory.

    Args:
        app: what is behind.
        max_body: bytes.
    """

    def __init__(self, app: ASGIApp, max_body: int) -> None:
        self._app, self._max, self._most = app, max_body, TOGETHER * max_body
        self._held = 0  # bytes of bodies whose requests are not answered yet

    async def __call__(self, scope: ASGIScope, receive: ASGIReceive, send: ASGISend) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        declared = Headers(scope=scope).get("content-length", "0")
        refusal = ApiError(413, f"the body is larger than {self._max:,} bytes", code="body_too_large")
        if declared.isdecimal() and int(declared[:20]) > self._max:
            if "expect" not in Headers(scope=scope):  # else it waits for a word before it sends
                await _drop(receive)
            return await error_response(refusal)(scope, receive, send)
        seen = 0

        async def counted() -> ASGIMessage:
            nonlocal seen
            message = await receive()
            size = len(message.get("body", b""))
            seen, self._held = seen + size, self._held + size
            if seen > self._max:
                if message.get("more_body"):
                    await _drop(receive)
                raise refusal
            if size and self._held > self._most:
                raise ApiError(503, "too many large bodies at a time", code="busy", retry_s=1)
            return message

        try:
            return await self._app(scope, counted, send)
        finally:
            self._held -= seen


async def _drop(receive: ASGIReceive) -> None:
    """Read what is left of a body, within bounds."""
    left = DROPPED
    with suppress(TimeoutError):
        async with asyncio.timeout(DROPPED_S):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body"):
                    return


def error_response(refusal: ApiError) -> JSONResponse:
    """The response; a connection whose body was not read is closed."""
    headers = refusal.headers | ({"Connection": "close"} if refusal.status == 413 else {})
    return JSONResponse(refusal.body, status_code=refusal.status, headers=headers)
