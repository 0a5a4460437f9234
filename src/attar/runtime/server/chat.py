"""POST /v1/chat/completions."""

from __future__ import annotations

from time import monotonic
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from attar.runtime.results import Event, gather
from attar.runtime.server.answers import head, reason, usage, why
from attar.runtime.server.chosen import chat_params
from attar.runtime.server.flow import RequestHandler
from attar.runtime.server.logprobs import of_chat
from attar.runtime.server.protocol import ChatRequest
from attar.runtime.server.service import Service


async def chat(service: Service, body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    start = monotonic()
    service.check_model(body.model)
    params = service.params(chat_params, body)
    with service.gate.entering(service.check_texts(1, params.n), service.caller(request)):
        ids = await service.chat_tokens(body.messages)
        flow = await service.start(request, "chatcmpl", params, [ids], priority=body.priority, start=start)
    answer = ChatResponse(service, body, flow)
    if not body.stream:
        return await service.whole(flow, answer.whole)
    return await service.streamed(flow, answer.chunks, answer.end)


class ChatResponse:
    """One answer while it is made."""

    def __init__(self, service: Service, body: ChatRequest, flow: RequestHandler) -> None:
        self._service, self._body, self._flow = service, body, flow
        self._begun: dict[int, bool] = {}  # choices whose role has been said

    def whole(self, events: list[list[Event]]) -> dict[str, Any]:
        """The body."""
        choices = [self._choice(index, mine) for index, mine in enumerate(events)]
        return self._head("chat.completion") | {"choices": choices, "usage": self._usage()}

    def chunks(self, index: int, event: Event) -> list[dict[str, Any]]:
        """What an event shows: the role once, the text, and the reason in a chunk of its own."""
        made = []
        if not self._begun.get(index):
            self._begun[index] = True
            made.append(self._chunk(index, {"role": "assistant", "content": "", "refusal": None}))
        if event.text or event.logprobs:
            scores = of_chat(event.logprobs, self._service.words) if event.logprobs else None
            made.append(self._chunk(index, {"content": event.text}, scores))
        if event.finished:
            last = self._chunk(index, {})
            last["choices"][0]["finish_reason"] = reason(event.finish_reason)
            last["choices"][0]["stop_reason"] = why(event.finish_reason, event.stop_reason)
            made.append(last)
        return made

    def end(self) -> list[dict[str, Any]]:
        """The chunk behind the last text: the usage, where it is asked for."""
        last = self._head("chat.completion.chunk") | {"choices": [], "usage": self._usage()}
        return [last] if self._no_usage() else []

    def _choice(self, index: int, events: list[Event]) -> dict[str, Any]:
        sample = gather(events, logprobs=bool(self._body.logprobs))
        scores = of_chat(sample.logprobs or (), self._service.words) if self._body.logprobs else None
        return {
            "index": index,
            "message": {"role": "assistant", "content": sample.text, "refusal": None},
            "logprobs": scores,
            "finish_reason": reason(sample.finish_reason),
            "stop_reason": why(sample.finish_reason, sample.stop_reason),
        }

    def _chunk(self, index: int, delta: dict[str, Any], scores: Any = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": scores, "finish_reason": None}
        return self._head("chat.completion.chunk") | {"choices": [choice]} | self._no_usage()

    def _head(self, kind: str) -> dict[str, Any]:
        return head(self._flow.id, kind, self._service.model, self._flow.created)

    def _usage(self) -> dict[str, Any]:
        return usage(self._flow.prompt_tokens, self._flow.completion_tokens, self._flow.cached_tokens)

    def _no_usage(self) -> dict[str, Any]:
        """``usage: null`` in every chunk but the last, where the last will have it."""
        options = self._body.stream_options
        return {"usage": None} if options is not None and options.include_usage else {}
