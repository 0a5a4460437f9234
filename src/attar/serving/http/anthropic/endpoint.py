"""POST /v1/messages and /v1/messages/count_tokens.

Items of an answer to the blocks and events of a message.

    message_start
    of each block: content_block_start, content_block_delta ..., content_block_stop
    message_delta (why it stopped, and the usage), message_stop
    ping after a silence; error, where the model fails

Blocks are thinking, text and tool_use, in the order in which the model wrote them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from time import monotonic
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from attar.runtime.results import Event
from attar.serving.http.answer import AnswerForm
from attar.serving.http.answer_items import AnswerItem, AnswerItems, ItemStep
from attar.serving.http.anthropic.errors import error_answer
from attar.serving.http.anthropic.messages import chat_request
from attar.serving.http.anthropic.protocol import MessagesRequest, TokenCountRequest
from attar.serving.http.bodies import ModelCard
from attar.serving.http.chat_endpoint import encode_prompt, naming_tools, sampling_of, start_chat
from attar.serving.http.errors import ApiError
from attar.serving.http.message_form import read_arguments
from attar.serving.http.request_handler import RequestHandler
from attar.serving.http.responses import SSE, named_event, respond
from attar.serving.http.service import Service

SIGNATURE = "attar"
"""Of thinking: it is not checked when it comes back; some clients keep no thinking without one."""
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageOutput:
    """The JSON of one message.

    Args:
        request_id: of errors.
    """

    alive, done, media_type = named_event({"type": "ping"}), b"", SSE

    def __init__(
        self, handler: RequestHandler, form: AnswerForm, items: AnswerItems, request_id: str
    ) -> None:
        self._handler, self._form, self._items, self._request_id = handler, form, items, request_id
        self._blocks: list[dict[str, Any]] = []
        self._begun = False
        self._stop: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    def body(self, events: list[list[Event]]) -> dict[str, Any]:
        """The whole message."""
        for event in events[0]:
            self.chunks(0, event)
        self.last_chunks()
        return self._message()

    def chunks(self, choice: int, event: Event) -> list[dict[str, Any]]:
        """The events that a piece of the completion makes."""
        chunks = [] if self._begun else [{"type": "message_start", "message": self._message()}]
        self._begun = True
        chunks += [chunk for step in self._items.read(event) for chunk in self._step(step)]
        if event.finished:
            self._stop = self._stop_of(event)
        return chunks

    def last_chunks(self) -> list[dict[str, Any]]:
        """The end of the last block, and of the message."""
        chunks = [chunk for step in self._items.close() for chunk in self._step(step)]
        chunks.append({"type": "message_delta", "delta": self._stop, "usage": self._usage()})
        return [*chunks, {"type": "message_stop"}]

    def failure(self, error: ApiError) -> dict[str, Any]:
        """The event of an error after the first one."""
        return error_answer(error, self._request_id)[1]

    def write(self, chunk: dict[str, Any]) -> bytes:
        """A server-sent event with its name."""
        return named_event(chunk)

    def _step(self, step: ItemStep) -> list[dict[str, Any]]:
        item = step.item
        if step.kind == "begin":
            self._blocks.append(self._empty_block(item))
            block = dict(self._blocks[-1])
            return [{"type": "content_block_start", "index": item.index, "content_block": block}]
        if step.kind == "add":
            return [_delta(item, *_DELTAS[item.kind], step.text)]
        return [*self._end(item), {"type": "content_block_stop", "index": item.index}]

    def _empty_block(self, item: AnswerItem) -> dict[str, Any]:
        if item.kind == "call":
            return {"type": "tool_use", "id": self._form.new_call_id(), "name": item.name, "input": {}}
        if item.kind == "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "text", "text": ""}

    def _end(self, item: AnswerItem) -> list[dict[str, Any]]:
        """Fill the block, and return its last delta."""
        block = self._blocks[item.index]
        if item.kind == "call":
            block["input"] = input_of(item.text)
        elif item.kind == "text":
            block["text"] = item.text
        else:
            block |= {"thinking": item.text, "signature": SIGNATURE}
            return [_delta(item, "signature_delta", "signature", SIGNATURE)]
        return []

    def _stop_of(self, event: Event) -> dict[str, str | None]:
        """Why the message ended. Stop strings of the model itself end its turn."""
        reason, sequence = "end_turn", None
        params = self._handler.params
        if event.finish_reason != "stop":
            most = params.max_tokens
            fewer = most is None or self._handler.completion_tokens < most
            full = fewer and event.finish_reason in ("length", "capacity")
            reason = "model_context_window_exceeded" if full else "max_tokens"
        elif isinstance(event.stop_reason, str) and event.stop_reason in params.stop:
            reason, sequence = "stop_sequence", event.stop_reason
        elif self._items.calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._handler.id,
            "type": "message",
            "role": "assistant",
            "model": self._handler.service.model,
            "content": self._blocks,
            **self._stop,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        """Of the prompt all tokens, until it is known how many were cached."""
        handler = self._handler
        prompt, cached = handler.prompt_tokens or sum(map(len, handler.prompts)), handler.cached_tokens
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": handler.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._items.reasoning_tokens},
        }


def input_of(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object; of one that was cut, what there is of them."""
    with suppress(ValueError):
        value = from_json(arguments or "{}", allow_partial="trailing-strings")
        if isinstance(value, dict):
            return value
    return read_arguments(arguments)


def _delta(item: AnswerItem, kind: str, name: str, text: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": item.index, "delta": {"type": kind, name: text}}


def model_info(card: ModelCard) -> dict[str, Any]:
    """A model; of one that is not loaded the context is not known."""
    created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
    info = {"type": "model", "id": card.id, "display_name": card.id, "created_at": created}
    return info | {"lifecycle": "active", "max_input_tokens": card.max_model_len}


def model_list(cards: Sequence[ModelCard]) -> dict[str, Any]:
    """All models, as one page."""
    ends = {"first_id": cards[0].id, "last_id": cards[-1].id} if cards else {}
    return {"data": [model_info(card) for card in cards], "has_more": False, **ends}


async def create_message(service: Service, body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation."""
    request_id: str = request.scope["state"]["request_id"]
    start, chat_body = monotonic(), chat_request(body)
    chat = await start_chat(service, chat_body, request, "msg", start, as_many_as_fit=True)
    thinking = body.thinking
    shown = thinking is None or (thinking.type != "disabled" and thinking.display != "omitted")

    def build() -> MessageOutput:
        return MessageOutput(
            chat.handler, service.answers, AnswerItems(chat.parser(), reasoning=shown), request_id
        )

    with naming_tools(chat.tools):
        response = await respond(chat.handler, build, stream=body.stream)
    response.headers["request-id"] = request_id
    return response


async def count_tokens(service: Service, body: TokenCountRequest, request: Request) -> Response:
    """Tokens of the prompt that a request would have."""
    chat = chat_request(body)
    tools, params = sampling_of(service, chat)
    with service.admission.preparing(1, service.caller(request)):
        ids, _ = await encode_prompt(service, chat, tools, params.guide is not None)
    return JSONResponse({"input_tokens": len(ids)})
