"""The application: middleware, routes, and errors in OpenAI's shape.

    access log → unexpected errors → host → API key → body limit → routes → endpoints

``create_app`` keeps no state outside of what it returns.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from attar.errors import AttarError
from attar.runtime.server import protocol
from attar.runtime.server.access_log import AccessLogMiddleware
from attar.runtime.server.admission_control import AdmissionControl
from attar.runtime.server.api_keys import make_api_keys
from attar.runtime.server.backend import Backend
from attar.runtime.server.endpoints import chat, complete
from attar.runtime.server.engine_state import add_state
from attar.runtime.server.errors import ApiError, ErrorBody
from attar.runtime.server.metrics import CONTENT_TYPE, Metrics
from attar.runtime.server.middleware import (
    ApiKeyMiddleware,
    BodyLimitMiddleware,
    HostMiddleware,
    UnexpectedErrorMiddleware,
    allowed_hosts,
    error_response,
)
from attar.runtime.server.request_body import BodyRoute
from attar.runtime.server.service import Service
from attar.runtime.server.settings import ServerSettings
from attar.runtime.server.tokenizer import ServerTokenizer
from attar.version import __version__

_ERRORS: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorBody, "description": "An error."}}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "The answer."}
}
_UNAVAILABLE: dict[int | str, dict[str, Any]] = {503: {"model": protocol.StateBody, "description": "Not so."}}
_METRICS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "For Prometheus."}
}


def create_app(
    backend: Backend,
    settings: ServerSettings | None = None,
    *,
    tokenizer: ServerTokenizer,
    model: str | None = None,
    facts: Mapping[str, Any] | None = None,
) -> FastAPI:
    """The server's application, for uvicorn or a test.

    Args:
        backend: the engine; closed when the application ends.
        model: the name that clients use, where ``settings.name`` is empty.
        facts: a description of the engine, for /v1/models and /metrics.

    Raises:
        DataError: the file of keys is wrong.
    """
    settings = settings or ServerSettings()
    name = settings.name or model or "attar"
    keys = make_api_keys(settings.api_key, settings.keys)
    admission = AdmissionControl(backend, settings.max_queue, settings.share)
    metrics = Metrics(backend, name, facts or {})
    service = Service(backend, tokenizer, settings, name, admission, metrics, facts=dict(facts or {}))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.openapi()  # built now, not while streams wait
        yield
        admission.draining = True
        await backend.close()
        service.threads.close()

    app = FastAPI(title="attar", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.include_router(make_routes(service))
    _handle_errors(app, service)
    app.add_middleware(BodyLimitMiddleware, max_body=settings.max_body)  # type: ignore[arg-type]
    app.add_middleware(ApiKeyMiddleware, keys=keys)  # type: ignore[arg-type]
    app.add_middleware(HostMiddleware, allowed=allowed_hosts(settings))  # type: ignore[arg-type]
    app.add_middleware(UnexpectedErrorMiddleware, error_for=service.error_for)  # type: ignore[arg-type]
    app.add_middleware(AccessLogMiddleware, prompts=settings.log_prompts)  # type: ignore[arg-type]
    return app


def _handle_errors(app: FastAPI, service: Service) -> None:
    """Answer every error in OpenAI's shape."""

    async def attar_error(request: Request, error: Any) -> JSONResponse:
        return error_response(service.error_for(error))

    async def http_error(request: Request, error: Any) -> JSONResponse:
        message = f"{error.detail}: {request.method} {request.url.path[:100]}"
        response = error_response(service.error_for(ApiError(error.status_code, message)))
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(ApiError, attar_error)
    app.add_exception_handler(AttarError, attar_error)
    app.add_exception_handler(HTTPException, http_error)


def make_routes(service: Service) -> APIRouter:
    """All paths of the API."""
    router = APIRouter(responses=_ERRORS, route_class=BodyRoute)
    _add_completions(router, service)
    _add_models(router, service)
    _add_tokenizer(router, service)
    _add_state(router, service)
    add_state(router, service)
    return router


def _add_completions(router: APIRouter, service: Service) -> None:
    @router.post("/v1/completions", response_model=protocol.CompletionBody, responses=_STREAM)
    async def create_completion(body: protocol.CompletionRequest, request: Request) -> Response:
        return await complete(service, body, request)

    @router.post("/v1/chat/completions", response_model=protocol.ChatBody, responses=_STREAM)
    async def create_chat_completion(body: protocol.ChatRequest, request: Request) -> Response:
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


def _add_tokenizer(router: APIRouter, service: Service) -> None:
    @router.post("/tokenize", response_model=protocol.TokenizeBody)
    async def tokenize(body: protocol.TokenizeRequest, request: Request) -> Response:
        service.check_model(body.model)
        with service.admission.preparing(1, service.caller(request)):
            if body.messages is not None:
                tokens = await service.encode_chat(body.messages)
            else:
                tokens = await service.encode(body.prompt or "", body.add_special_tokens)
        context = service.backend.context
        response = protocol.TokenizeBody(count=len(tokens), max_model_len=context, tokens=tokens)
        return JSONResponse(response.model_dump())

    @router.post("/detokenize", response_model=protocol.DetokenizeBody)
    async def detokenize(body: protocol.DetokenizeRequest, request: Request) -> Response:
        service.check_model(body.model)
        if any(token >= service.backend.vocabulary for token in body.tokens):
            message = f"a token is outside the vocabulary of {service.backend.vocabulary:,}"
            raise ApiError(400, message, param="tokens", code="invalid_value")
        with service.admission.preparing(1, service.caller(request)):
            decode = service.tokenizer.decode
            text = await service.threads.run_sized(len(body.tokens), decode, body.tokens)
        return JSONResponse({"prompt": text})


def _add_state(router: APIRouter, service: Service) -> None:
    @router.get("/health", response_model=protocol.StateBody, responses=_UNAVAILABLE)
    async def health() -> JSONResponse:
        """Whether the process should live: 503 once the engine has stopped."""
        if service.backend.alive:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "stopped", "reason": service.failure_reason()}, status_code=503)

    @router.get("/ready", response_model=protocol.StateBody, responses=_UNAVAILABLE)
    async def ready() -> JSONResponse:
        """Whether the server takes new requests: 503 while it drains."""
        accepting = service.backend.alive and not service.admission.draining
        status = "ready" if accepting else "draining"
        return JSONResponse({"status": status}, status_code=200 if accepting else 503)

    @router.get("/metrics", response_class=Response, responses=_METRICS)
    async def metrics() -> Response:
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})
