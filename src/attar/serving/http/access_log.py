"""Access log: a line of JSON per request on the logger ``attar.server``; bodies only with ``log_prompts``.

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

from attar.serving.http.middleware import LOGGER, ASGIApp, ASGIMessage, ASGIReceive, ASGIScope, ASGISend

_QUIET = ("/health", "/ready", "/metrics", "/attar/state")  # polled every few seconds
_MAX_ID = 128  # characters
_MAX_BODY = 1 << 20  # bytes of a body that are logged


class AccessLogMiddleware:
    """Logs a request when its response is complete; gives every response an ``X-Request-Id``."""

    def __init__(self, app: ASGIApp, prompts: bool = False) -> None:
        self._app, self._prompts = app, prompts
        self._logger = logging.getLogger(LOGGER)

    async def __call__(self, scope: ASGIScope, receive: ASGIReceive, send: ASGISend) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        start = time.monotonic()
        state = scope.setdefault("state", {})
        log_fields = state.setdefault("log_fields", {})
        state["request_id"] = _request_id(scope)
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": state["request_id"],
        }
        line |= {"method": scope["method"], "path": scope["path"][:200], "status": 500}
        body: list[bytes] = []

        async def receive_and_record() -> ASGIMessage:
            message = await receive()
            if self._prompts:
                body.append(message.get("body", b"")[: max(_MAX_BODY - sum(map(len, body)), 0)])
            return message

        async def send_with_id(message: ASGIMessage) -> None:
            if message["type"] == "http.response.start":
                line["status"] = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = line["id"]
            await send(message)

        try:
            await self._app(scope, receive_and_record, send_with_id)
        finally:
            line |= {"seconds": round(time.monotonic() - start, 6), **log_fields}
            with log_errors("the log"):
                self._write(line, body)

    def _write(self, line: dict[str, Any], body: list[bytes]) -> None:
        if self._prompts:
            line["body"] = b"".join(body).decode("utf-8", "replace")
        level = logging.DEBUG if line["path"] in _QUIET and line["status"] < 400 else logging.INFO
        self._logger.log(level, json.dumps(line, default=str))


@contextmanager
def log_errors(what: str) -> Iterator[None]:
    """For work after a response, or for statistics: log its errors, and do not fail the request."""
    try:
        yield
    except Exception:
        logging.getLogger(LOGGER).exception("%s failed", what)


def _request_id(scope: ASGIScope) -> str:
    """The client's id where it is short and printable, else a new one."""
    id = Headers(scope=scope).get("x-request-id", "")
    valid = id.isascii() and id.isprintable() and 0 < len(id) <= _MAX_ID
    return id if valid else uuid4().hex
