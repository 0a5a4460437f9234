"""One line of JSON for each request, on the logger ``attar.server``; prompts and texts only where asked for.

{"time", "id", "method", "path", "status", "seconds", "request", "prompt_tokens", "completion_tokens", ...}
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders

from attar.runtime.server.middleware import ASGIApp, ASGIMessage, ASGIReceive, ASGIScope, ASGISend

LOGGER = "attar.server"
_QUIET = ("/health", "/ready", "/metrics")  # asked every few seconds
_LONGEST_ID = 128
_LONGEST_BODY = 1 << 20  # bytes of it that are written


class AccessLogMiddleware:
    """Writes the line when the answer is complete; gives every answer an ``X-Request-Id``.

    Args:
        app: what is behind.
        prompts: write the body of the request as well.
    """

    def __init__(self, app: ASGIApp, prompts: bool = False) -> None:
        self._app, self._prompts = app, prompts
        self._logger = logging.getLogger(LOGGER)

    async def __call__(self, scope: ASGIScope, receive: ASGIReceive, send: ASGISend) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        start, facts = time.monotonic(), scope.setdefault("state", {}).setdefault("facts", {})
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": _id(scope),
        }
        line |= {"method": scope["method"], "path": scope["path"][:200], "status": 500}
        body: list[bytes] = []

        async def noted() -> ASGIMessage:
            message = await receive()
            if self._prompts:
                body.append(message.get("body", b"")[: max(_LONGEST_BODY - sum(map(len, body)), 0)])
            return message

        async def named(message: ASGIMessage) -> None:
            if message["type"] == "http.response.start":
                line["status"] = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = line["id"]
            await send(message)

        try:
            await self._app(scope, noted, named)
        finally:
            line |= {"seconds": round(time.monotonic() - start, 6), **facts}
            with log_errors("the log"):
                self._write(line, body)

    def _write(self, line: dict[str, Any], body: list[bytes]) -> None:
        if self._prompts:
            line["body"] = b"".join(body).decode("utf-8", "replace")
        level = logging.DEBUG if line["path"] in _QUIET and line["status"] < 400 else logging.INFO
        self._logger.log(level, json.dumps(line, default=str))


@contextmanager
def log_errors(what: str) -> Iterator[None]:
    """For what comes behind an answer, or counts it: an error goes to the log and costs nobody the answer."""
    try:
        yield
    except Exception:
        logging.getLogger(LOGGER).exception("%s failed", what)


def _id(scope: ASGIScope) -> str:
    """The client's own, where it is short and harmless, else a new one."""
    given = Headers(scope=scope).get("x-request-id", "")
    fine = given.isascii() and given.isprintable() and 0 < len(given) <= _LONGEST_ID
    return given if fine else uuid4().hex
