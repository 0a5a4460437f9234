"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from time import monotonic
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from attar.serving.http.answer_items import AnswerItems
from attar.serving.http.anthropic.messages import chat_request
from attar.serving.http.anthropic.output import MessageOutput
from attar.serving.http.anthropic.protocol import MessagesRequest, TokenCountRequest
from attar.serving.http.bodies import ModelCard
from attar.serving.http.chat_endpoint import encode_prompt, naming_tools, sampling_of, start_chat
from attar.serving.http.responses import respond
from attar.serving.http.service import Service


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
