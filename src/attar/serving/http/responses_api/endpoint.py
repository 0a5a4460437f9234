"""POST /v1/responses, and GET and DELETE of one that is stored.

Responses that a next request may go on from: in memory, of this process.

Each is its caller's alone, and the caller that has most of them loses its oldest first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from attar.runtime.fair_cache import FairCache
from attar.serving.http.chat_endpoint import naming_tools, start_chat
from attar.serving.http.errors import ApiError
from attar.serving.http.responses import respond
from attar.serving.http.responses_api.items import chat_request, input_items, messages_of
from attar.serving.http.responses_api.output import ResponseOutput, items_of
from attar.serving.http.responses_api.protocol import InputItem, ResponsesRequest
from attar.serving.http.service import Service

MAX_RESPONSES = 1024
MAX_BYTES = 32 << 20


@dataclass(frozen=True)
class StoredResponse:
    """A finished response.

    Attributes:
        items: the whole conversation up to its end, as input items; without instructions.
        answer: as it was returned.
    """

    items: tuple[dict[str, Any], ...]
    answer: dict[str, Any]


class ResponseStore(FairCache[StoredResponse]):
    """The responses of a server.

    Args:
        most: responses; bytes: of all of them in JSON.
    """

    def __init__(self, most: int = MAX_RESPONSES, bytes: int = MAX_BYTES) -> None:
        super().__init__(most, bytes)

    def keep(self, owner: str, items: Sequence[dict[str, Any]], answer: dict[str, Any]) -> None:
        """Keep a response, unless it alone is too large."""
        size = len(json.dumps([items, answer]))
        self.put(owner, answer["id"], StoredResponse(tuple(items), answer), size)


_REPEATED = ("model", "instructions", "max_output_tokens", "temperature", "top_p", "previous_response_id")


async def respond_to(
    service: Service, store: ResponseStore, body: ResponsesRequest, request: Request
) -> Response:
    """Answer a request, and keep the response unless ``store`` is false."""
    start = time.monotonic()
    owner = owner_of(service, request)
    items = [item.model_dump(exclude_none=True) for item in input_items(body)]
    if body.previous_response_id is not None:
        items = [*stored(store, owner, body.previous_response_id).items, *items]
    messages = messages_of([InputItem.model_validate(item) for item in items], body.instructions)
    if not messages:
        raise ApiError(400, "the input has no message", param="input", code="invalid_value")
    chat = await start_chat(service, chat_request(body, messages), request, "resp", start)

    def keep(response: dict[str, Any]) -> None:
        if body.store is not False:
            store.keep(owner, [*items, *items_of(response)], response)

    def build() -> ResponseOutput:
        return ResponseOutput(chat.handler, service.answers, chat.parser(), repeated_fields(body), keep)

    with naming_tools(chat.tools):
        return await respond(chat.handler, build, stream=body.stream)


def stored(store: ResponseStore, owner: str, id: str) -> StoredResponse:
    """A response of a caller.

    Raises:
        ApiError: 404, there is none, or no more.
    """
    response = store.get(owner, id)
    if response is None:
        message = f"there is no response {id[:100]!r}: responses are kept in memory, the latest of them"
        raise ApiError(404, message, param="previous_response_id", code="previous_response_not_found")
    return response


def retrieve(service: Service, store: ResponseStore, id: str, request: Request) -> Response:
    """A stored response."""
    return JSONResponse(stored(store, owner_of(service, request), id).answer)


def delete(service: Service, store: ResponseStore, id: str, request: Request) -> Response:
    """Forget a stored response."""
    owner = owner_of(service, request)
    stored(store, owner, id)  # or 404
    store.delete(owner, id)
    return JSONResponse({"id": id, "object": "response", "deleted": True})


def owner_of(service: Service, request: Request) -> str:
    """Who may see a response: the same key, or address."""
    caller = service.caller(request)
    return f"{caller.name} {caller.salt}"


def repeated_fields(body: ResponsesRequest) -> dict[str, Any]:
    """Fields of the request in its response, with OpenAI's defaults."""
    fields = {name: getattr(body, name) for name in _REPEATED}
    choice = body.tool_choice if isinstance(body.tool_choice, str | None) else body.tool_choice.model_dump()
    text = None if body.text is None else body.text.model_dump(by_alias=True, exclude_none=True)
    return fields | {
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "tool_choice": choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": {"type": "text"}} | (text or {}),
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": body.store is not False,
        "truncation": "disabled",
        "metadata": body.metadata or {},
        "background": False,
    }
