"""What is checked before a body is read: keys and sizes. Plain ASGI, so that streams pass through untouched.

A body is counted as it comes in, whatever its header says; one that is too large is answered with 413 and not
read to its end. ``/health`` and ``/ready`` need no key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
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
            return await answer(refusal)(scope, receive, send)
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max:
                raise HTTPException(refusal.status, refusal.message)  # the one kind that FastAPI lets through
            return message

        return await self._app(scope, counted, send)


def answer(refusal: RefusedError) -> JSONResponse:
    """The response; a connection whose body was not read is closed."""
    headers = refusal.headers | ({"Connection": "close"} if refusal.status == 413 else {})
    return JSONResponse(refusal.body, status_code=refusal.status, headers=headers)
