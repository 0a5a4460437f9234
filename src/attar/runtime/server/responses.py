"""Server-sent events: ``data: JSON`` for each chunk, ``data: [DONE]`` at the end, a comment after a silence.

The usage is in the last chunk where ``stream_options.include_usage`` asks for it, with no choices. An error
after the first chunk is a chunk of its own, ``{"error": ...}``: the status has been sent already.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from attar.runtime.server.middleware import ASGIReceive, ASGIScope, ASGISend

DONE = b"data: [DONE]\n\n"
ALIVE = b": alive\n\n"


def sse_event(data: Mapping[str, Any]) -> bytes:
    """One event."""
    return b"data: " + dump_json(data).encode() + b"\n\n"


class EventStreamResponse(Response):
    """Sends chunks as they are made, and closes their generator whatever happens.

    Args:
        chunks: it watches for the client's leaving itself.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: ASGIScope, receive: ASGIReceive, send: ASGISend) -> None:
        async with aclosing(self._chunks) as chunks:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            async for part in chunks:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


_DEEP = 5  # levels above the entries of log-probabilities


def dump_json(data: Any, levels: int = _DEEP) -> str:
    """JSON without blanks.

    Args:
        levels: of objects and lists whose items are written one by one.

    Raises:
        ValueError: NaN or an infinity, which JSON does not have.
    """
    if levels and isinstance(data, dict):
        return "{" + ",".join(f"{_plain(str(key))}:{dump_json(data[key], levels - 1)}" for key in data) + "}"
    if levels and isinstance(data, list):
        return "[" + ",".join(dump_json(item, levels - 1) for item in data) + "]"
    return _plain(data)


def _plain(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
