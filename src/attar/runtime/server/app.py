"""The application: routes, error shapes, and what stands before them.

    journal → bugs → hosts → keys → body limit → routes

``create_app`` has no state outside what it returns. A page for people can be added as a router on ``/``.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from attar.errors import AttarError
from attar.runtime.server import protocol
from attar.runtime.server.access_log import LOGGER, AccessLogMiddleware
from attar.runtime.server.admission_control import AdmissionControl
from attar.runtime.server.api_keys import make_api_keys
from attar.runtime.server.backend import Backend, Words
from attar.runtime.server.endpoints import chat, complete
from attar.runtime.server.errors import ApiError, ErrorBody
from attar.runtime.server.metrics import CONTENT_TYPE, Metrics
from attar.runtime.server.middleware import (
    ApiKeyMiddleware,
    ASGIApp,
    ASGIMessage,
    ASGIReceive,
    ASGIScope,
    ASGISend,
    BodyLimitMiddleware,
    HostMiddleware,
    allowed_hosts,
    error_response,
)
from attar.runtime.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from attar.runtime.server.request_body import BodyRoute
from attar.runtime.server.service import Service
from attar.runtime.server.settings import ServerSettings
from attar.version import __version__


def create_app(
    backend: Backend,
    settings: ServerSettings | None = None,
    *,
    words: Words,
    model: str | None = None,
    facts: Mapping[str, Any] | None = None,
    page: APIRouter | None = None,
) -> FastAPI:
    """The server's application, for uvicorn or a test.

    Args:
        backend: the engine; closed when the application ends.
        settings: limits and keys.
        words: the tokenizer.
        model: the name that clients give, where ``settings.name`` is empty.
        facts: what runs the model, for /v1/models and /metrics.
        page: further routes.

    Raises:
        DataError: the file of keys is wrong.
    """
    settings = settings or ServerSettings()
    name = settings.name or model or "attar"
    keys = make_api_keys(settings.api_key, settings.keys)
    gate = AdmissionControl(backend, settings.max_queue, settings.share)
    metrics = Metrics(backend, name, facts or {})
    service = Service(backend, words, settings, name, gate, metrics, facts=dict(facts or {}))

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        app.openapi()  # made once, and not while streams wait
        yield
        gate.draining = True
        await backend.close()
        service.lanes.close()

    app = FastAPI(title="attar", version=__version__, lifespan=life, docs_url=None, redoc_url=None)
    app.state.service = service
    app.include_router(make_routes(service))
    if page is not None:
        app.include_router(page)
    _handle_errors(app, service)
    app.add_middleware(BodyLimitMiddleware, max_body=settings.max_body)  # type: ignore[arg-type]
    app.add_middleware(ApiKeyMiddleware, keys=keys)  # type: ignore[arg-type]
    app.add_middleware(HostMiddleware, allowed=allowed_hosts(settings))  # type: ignore[arg-type]
    app.add_middleware(UnexpectedErrorMiddleware, service=service)  # type: ignore[arg-type]
    app.add_middleware(AccessLogMiddleware, prompts=settings.log_prompts)  # type: ignore[arg-type]
    return app


class UnexpectedErrorMiddleware:
    """Answers what nobody foresaw with 500, and logs it.

    Left to uvicorn, it would close the connection, where a body that is still coming in cuts off the answer,
    and where a proxy may have sent somebody else's request.

    Args:
        app: what is behind.
        service: counts the answer.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: ASGIScope, receive: ASGIReceive, send: ASGISend) -> None:
        started = scope["type"] != "http"

        async def noted(message: ASGIMessage) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            if started:
                raise
            logging.getLogger(LOGGER).error("a request failed", exc_info=error)
            await error_response(self._service.refused(error))(scope, receive, send)


def _handle_errors(app: FastAPI, service: Service) -> None:
    """Every error in OpenAI's shape."""

    async def refused(request: Request, error: Any) -> JSONResponse:
        return error_response(service.refused(error))

    async def http(request: Request, error: Any) -> JSONResponse:
        asked = f"{request.method} {request.url.path[:100]}"
        made = error_response(service.refused(ApiError(error.status_code, f"{error.detail}: {asked}")))
        made.headers.update(error.headers or {})
        return made

    app.add_exception_handler(ApiError, refused)
    app.add_exception_handler(AttarError, refused)
    app.add_exception_handler(HTTPException, http)


_ERRORS: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorBody, "description": "An error."}}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "The answer."}
}
_STOPPED: dict[int | str, dict[str, Any]] = {503: {"model": protocol.StateBody, "description": "Not so."}}
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
    @router.post("/v1/completions", response_model=protocol.CompletionBody, responses=_STREAM)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        return await complete(service, body, request)

    @router.post("/v1/chat/completions", response_model=protocol.ChatBody, responses=_STREAM)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        return await chat(service, body, request)


def _add_models(router: APIRouter, service: Service) -> None:
    def card() -> protocol.ModelCard:
        return protocol.ModelCard(
            id=service.model,
            created=service.created,
            max_model_len=service.backend.context,
            runtime=service.facts,
        )

    @router.get("/v1/models")
    async def list_models() -> protocol.ModelList:
        return protocol.ModelList(data=[card()])

    @router.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> protocol.ModelCard:
        service.check_model(model)
        return card()


def _add_words(router: APIRouter, service: Service) -> None:
    @router.post("/tokenize", response_model=protocol.TokenizeBody)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        service.check_model(body.model)
        with service.gate.entering(1, service.caller(request)):
            if body.messages is not None:
                tokens = await service.chat_tokens(body.messages)
            else:
                tokens = await service.tokens(body.prompt or "", body.add_special_tokens)
        context = service.backend.context
        made = protocol.TokenizeBody(count=len(tokens), max_model_len=context, tokens=tokens)
        return JSONResponse(made.model_dump())

    @router.post("/detokenize", response_model=protocol.DetokenizeBody)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        service.check_model(body.model)
        if any(token >= service.backend.vocabulary for token in body.tokens):
            message = f"a token is not of the vocabulary of {service.backend.vocabulary:,}"
            raise ApiError(400, message, param="tokens", code="invalid_value")
        with service.gate.entering(1, service.caller(request)):
            text = await service.lanes.sized(len(body.tokens), service.words.decode, body.tokens)
        return JSONResponse({"prompt": text})


def _add_state(router: APIRouter, service: Service) -> None:
    @router.get("/health", response_model=protocol.StateBody, responses=_STOPPED)
    async def health() -> JSONResponse:
        """Whether the process should live: 503 once the engine has stopped."""
        if service.backend.alive:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "stopped", "reason": service.why_stopped()}, status_code=503)

    @router.get("/ready", response_model=protocol.StateBody, responses=_STOPPED)
    async def ready() -> JSONResponse:
        """Whether new requests are taken: 503 while the server goes down."""
        taken = service.backend.alive and not service.gate.draining
        return JSONResponse({"status": "ready" if taken else "draining"}, status_code=200 if taken else 503)

    @router.get("/metrics", response_class=Response, responses=_METRICS)
    async def metrics() -> Response:
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})
