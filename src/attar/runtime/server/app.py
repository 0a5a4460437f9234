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
from starlette.responses import JSONResponse

import attar
from attar.errors import AttarError
from attar.runtime.server.backend import Backend, Words
from attar.runtime.server.failures import ApiError
from attar.runtime.server.gate import AdmissionControl
from attar.runtime.server.journal import LOGGER, AccessLogMiddleware
from attar.runtime.server.keys import make_api_keys
from attar.runtime.server.limits import (
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
from attar.runtime.server.metrics import Metrics
from attar.runtime.server.routes import make_routes
from attar.runtime.server.service import Service
from attar.runtime.server.settings import ServerSettings


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

    app = FastAPI(title="attar", version=attar.__version__, lifespan=life, docs_url=None, redoc_url=None)
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
