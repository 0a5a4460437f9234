"""The paths of the server."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from attar.runtime.server import answers, chat, completions
from attar.runtime.server.bodies import BodyRoute
from attar.runtime.server.failures import ApiError, ErrorBody
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
    router = APIRouter(responses=_ERRORS, route_class=BodyRoute)
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
            id=service.model,
            created=service.created,
            max_model_len=service.backend.context,
            runtime=service.facts,
        )

    @router.get("/v1/models")
    async def list_models() -> answers.ModelList:
        return answers.ModelList(data=[card()])

    @router.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> answers.ModelCard:
        service.check_model(model)
        return card()


def _add_words(router: APIRouter, service: Service) -> None:
    @router.post("/tokenize", response_model=answers.TokenizeBody)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        service.check_model(body.model)
        with service.gate.entering(1, service.caller(request)):
            if body.messages is not None:
                tokens = await service.chat_tokens(body.messages)
            else:
                tokens = await service.tokens(body.prompt or "", body.add_special_tokens)
        context = service.backend.context
        made = answers.TokenizeBody(count=len(tokens), max_model_len=context, tokens=tokens)
        return JSONResponse(made.model_dump())

    @router.post("/detokenize", response_model=answers.DetokenizeBody)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        service.check_model(body.model)
        if any(token >= service.backend.vocabulary for token in body.tokens):
            message = f"a token is not of the vocabulary of {service.backend.vocabulary:,}"
            raise ApiError(400, message, param="tokens", code="invalid_value")
        with service.gate.entering(1, service.caller(request)):
            text = await service.lanes.sized(len(body.tokens), service.words.decode, body.tokens)
        return JSONResponse({"prompt": text})


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
