"""What is checked before a body is read: keys and sizes. Plain ASGI, so that streams pass through untouched.

A body is counted as it comes in, whatever its header says; one that is too large is answered with 413. What
is left of it is read and dropped for a while, for a client that is cut off while it sends does not see the
answer. ``/health`` and ``/ready`` need no key.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from attar.runtime.server.failures import RefusedError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
OPEN = ("/health", "/ready")
DROPPED = 64 << 20  # bytes of a body that is too large, read at most
DROPPED_S = 10.0  # seconds at most


class Keys:
    """Lets only those in who know a key; each key is a tenant, whose prefixes nobody else's requests find.

    Args:
        app: what is behind.
        keys: any of them will do; none: everybody may come.
    """

    def __init__(self, app: App, keys: Sequence[str]) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and scope["path"] not in OPEN:
            sent = Headers(scope=scope).get("authorization", "")
            kind, _, key = sent.partition(" ")
            given = key.strip().encode("latin-1", "replace") if kind.lower() == "bearer" else b""
            # every key is compared, so that the time tells nothing
            matches = [hmac.compare_digest(given, known) for known in self._keys]
            if not any(matches):
                message = "Incorrect API key provided." if given else "You didn't provide an API key."
                refusal = RefusedError(401, message, code="invalid_api_key")
                return await answer(refusal)(scope, receive, send)
            scope.setdefault("state", {})["salt"] = hashlib.sha256(given).hexdigest()[:16]
        return await self._app(scope, receive, send)


class BodyLimit:
    """Refuses bodies above a size.

    Args:
        app: what is behind.
        max_body: bytes.
    """

    def __init__(self, app: App, max_body: int) -> None:
        self._app, self._max = app, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        declared = Headers(scope=scope).get("content-length", "0")
        refusal = RefusedError(413, f"the body is larger than {self._max:,} bytes", code="body_too_large")
        if declared.isdecimal() and int(declared[:20]) > self._max:
            if "expect" not in Headers(scope=scope):  # else it waits for a word before it sends
                await _drop(receive)
            return await answer(refusal)(scope, receive, send)
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max:
                if message.get("more_body"):
                    await _drop(receive)
                raise HTTPException(refusal.status, refusal.message)  # the one kind that FastAPI lets through
            return message

        return await self._app(scope, counted, send)


async def _drop(receive: Receive) -> None:
    """Read what is left of a body, within bounds."""
    left = DROPPED
    with suppress(TimeoutError):
        async with asyncio.timeout(DROPPED_S):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body"):
                    return


def answer(refusal: RefusedError) -> JSONResponse:
    """The response; a connection whose body was not read is closed."""
    headers = refusal.headers | ({"Connection": "close"} if refusal.status == 413 else {})
    return JSONResponse(refusal.body, status_code=refusal.status, headers=headers)
