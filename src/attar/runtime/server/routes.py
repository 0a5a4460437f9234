"""The paths of the server."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from attar.runtime.server import answers, chat, completions
from attar.runtime.server.failures import ErrorBody, RefusedError
from attar.runtime.server.metrics import CONTENT_TYPE
from attar.runtime.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from attar.runtime.server.service import Service

_ERRORS: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorBody, "description": "An error."}}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "The answer."}
}
_STOPPED: dict[int | str, dict[str, Any]] = {503: {"model": answers.StateBody, "description": "Not so."}}
_METRICS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "For Prometheus."}
}


def make_routes(service: Service) -> APIRouter:
    """All paths but the page for people."""
    router = APIRouter(responses=_ERRORS)
    _add_answers(router, service)
    _add_models(router, service)
    _add_words(router, service)
    _add_state(router, service)
    return router


def _add_answers(router: APIRouter, service: Service) -> None:
    @router.post("/v1/completions", response_model=answers.CompletionBody, responses=_STREAM)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        return await completions.complete(service, body, request)

    @router.post("/v1/chat/completions", response_model=answers.ChatBody, responses=_STREAM)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        return await chat.chat(service, body, request)


def _add_models(router: APIRouter, service: Service) -> None:
    def card() -> answers.ModelCard:
        return answers.ModelCard(
            id=service.model, created=service.created, max_model_len=service.backend.context
        )

    @router.get("/v1/models")
    async def list_models() -> answers.ModelList:
        return answers.ModelList(data=[card()])

    @router.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> answers.ModelCard:
        service.check_model(model)
        return card()


def _add_words(router: APIRouter, service: Service) -> None:
    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> answers.TokenizeBody:
        service.check_model(body.model)
        if body.messages is not None:
            messages = [message.plain() for message in body.messages]
            tokens = await service.aside(service.words.chat, messages)
        else:
            tokens = await service.aside(service.words.encode, body.prompt, body.add_special_tokens)
        return answers.TokenizeBody(count=len(tokens), max_model_len=service.backend.context, tokens=tokens)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> answers.DetokenizeBody:
        service.check_model(body.model)
        if any(token >= service.backend.vocabulary for token in body.tokens):
            message = f"a token is not of the vocabulary of {service.backend.vocabulary:,}"
            raise RefusedError(400, message, param="tokens", code="invalid_value")
        return answers.DetokenizeBody(prompt=await service.aside(service.words.decode, body.tokens))


def _add_state(router: APIRouter, service: Service) -> None:
    @router.get("/health", response_model=answers.StateBody, responses=_STOPPED)
    async def health() -> JSONResponse:
        """Whether the process should live: 503 once the engine has stopped."""
        if service.backend.alive:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "stopped", "reason": service.why_stopped()}, status_code=503)

    @router.get("/ready", response_model=answers.StateBody, responses=_STOPPED)
    async def ready() -> JSONResponse:
        """Whether new requests are taken: 503 while the server goes down."""
        taken = service.backend.alive and not service.gate.draining
        return JSONResponse({"status": "ready" if taken else "draining"}, status_code=200 if taken else 503)

    @router.get("/metrics", response_class=Response, responses=_METRICS)
    async def metrics() -> Response:
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})
