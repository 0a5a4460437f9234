"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from time import monotonic

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from attar.serving.http.answer_items import AnswerItems
from attar.serving.http.anthropic.messages import chat_request
from attar.serving.http.anthropic.output import MessageOutput
from attar.serving.http.anthropic.protocol import MessagesRequest, TokenCountRequest
from attar.serving.http.chat_endpoint import encode_prompt, naming_tools, sampling_of, start_chat
from attar.serving.http.responses import respond
from attar.serving.http.service import Service


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
