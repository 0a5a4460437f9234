"""From a request's events to its HTTP response: one JSON body, or a stream in the form of its builder.

    data: JSON          for each chunk; the usage in a last one without choices, where it was requested
    : alive             a comment, after a silence
    data: [DONE]        at the end

An error after the first chunk is a separate chunk, ``{"error": ...}``, because the status has been sent.
Long bodies are written in threads.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any, Protocol

from starlette.responses import Response

from attar.errors import AttarError
from attar.runtime.results import Event
from attar.serving.http.errors import ApiError, api_error
from attar.serving.http.middleware import LOGGER, ASGIReceive, ASGIScope, ASGISend
from attar.serving.http.request_handler import ChoiceEvents, ClientDisconnectedError, RequestHandler

DONE = b"data: [DONE]\n\n"
ALIVE = b": alive\n\n"
SSE = "text/event-stream"
_DISCONNECTED = 499  # the status in the log
_INLINE_LOGPROBS = 32  # tokens with log-probabilities that the event loop writes itself
_LEVELS = 5  # of JSON above the entries of log-probabilities


class ResponseBuilder(Protocol):
    """JSON of an endpoint."""

    def body(self, events: list[list[Event]]) -> dict[str, Any]:
        """The whole body, from the events of each choice; called in a thread."""

    def chunks(self, choice: int, event: Event) -> list[dict[str, Any]]:
        """The chunks of an event."""

    def last_chunks(self) -> list[dict[str, Any]]:
        """The chunks after the last event."""

    def failure(self, error: ApiError) -> dict[str, Any]:
        """The chunk of an error."""

    def write(self, chunk: dict[str, Any]) -> bytes:
        """A chunk as bytes of the stream."""

    @property
    def alive(self) -> bytes:
        """What a stream sends after a silence."""

    @property
    def done(self) -> bytes:
        """The end of a stream."""

    @property
    def media_type(self) -> str:
        """Of a stream."""


async def respond(
    handler: RequestHandler, build: Callable[[], ResponseBuilder], *, stream: bool | None
) -> Response:
    """The response to a request whose prompts are submitted.

    Args:
        build: makes the builder; where it fails, the request is closed.

    Raises:
        ApiError: what is refused before the first event has a status of its own.
    """
    service = handler.service
    async with AsyncExitStack() as stack:
        stack.push_async_callback(handler.close)
        builder = build()
        try:
            if stream:
                events = handler.events(service.settings.alive_s)
                chunks = _stream_chunks(handler, await anext(events), events, builder)
                response = EventStreamResponse(chunks, builder.media_type)
                stack.pop_all()  # the response closes the handler
                return response
            choices: list[list[Event]] = [[] for _ in range(handler.choices)]
            async for batch in handler.events():
                for choice, event in batch:
                    choices[choice].append(event)
            content = await service.threads.run_response(_write_body, builder, choices)
            return Response(content, media_type="application/json")
        except ClientDisconnectedError:
            return Response(status_code=_DISCONNECTED)
        except AttarError as error:
            raise api_error(error, service.admission.retry_s()) from error


async def _stream_chunks(
    handler: RequestHandler,
    first: ChoiceEvents,
    events: AsyncGenerator[ChoiceEvents, None],
    builder: ResponseBuilder,
) -> AsyncGenerator[bytes, None]:
    """The body of a stream; chunks with many log-probabilities are written in a thread."""
    batch: ChoiceEvents | None = first
    try:
        while batch is not None:
            if sum(len(event.logprobs) for _, event in batch) > _INLINE_LOGPROBS:
                yield await handler.service.threads.run_response(_write_chunks, batch, builder)
            elif part := _write_chunks(batch, builder):
                yield part
            batch = await anext(events, None)
        for data in builder.last_chunks():
            yield builder.write(data)
    except ClientDisconnectedError:
        return
    except Exception as error:
        if not isinstance(error, AttarError | ApiError):
            logging.getLogger(LOGGER).error("request %s failed", handler.id, exc_info=error)
        yield builder.write(builder.failure(handler.service.error_for(error)))
    finally:
        await handler.close()
    if builder.done:
        yield builder.done


def _write_chunks(events: ChoiceEvents, builder: ResponseBuilder) -> bytes:
    if not events:
        return builder.alive
    return b"".join(builder.write(data) for choice, event in events for data in builder.chunks(choice, event))


def _write_body(builder: ResponseBuilder, events: list[list[Event]]) -> bytes:
    return dump_json(builder.body(events)).encode()


def sse_event(data: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + dump_json(data).encode() + b"\n\n"


def named_event(data: Mapping[str, Any]) -> bytes:
    """A server-sent event with its type as its name."""
    return f"event: {data['type']}\n".encode() + sse_event(data)


class EventStreamResponse(Response):
    """Sends chunks as they arrive, and closes their generator in any case.

    Args:
        chunks: watches for the client's disconnect itself.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None], media_type: str = SSE) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
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


def dump_json(data: Any, levels: int = _LEVELS) -> str:
    """JSON without blanks, item by item: Python's encoder blocks all other threads until it returns.

    Args:
        levels: of objects and lists whose items are written one by one.

    Raises:
        ValueError: NaN or an infinity, which JSON does not have.
    """
    if levels and isinstance(data, dict):
        items = (f"{_encode(str(key))}:{dump_json(value, levels - 1)}" for key, value in data.items())
        return "{" + ",".join(items) + "}"
    if levels and isinstance(data, list):
        return "[" + ",".join(dump_json(item, levels - 1) for item in data) + "]"
    return _encode(data)


def _encode(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
