"""The application: middleware, routes, and errors in the form of their path's API.

    access log → unexpected errors → checks of host and API key → body limit → routes → endpoints

``create_app`` keeps no state outside of what it returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from attar.errors import AttarError
from attar.serving.http import bodies, protocol
from attar.serving.http.access_log import AccessLogMiddleware
from attar.serving.http.admission_control import AdmissionControl
from attar.serving.http.answer import AnswerForm
from attar.serving.http.anthropic import protocol as of_anthropic
from attar.serving.http.anthropic.endpoint import count_tokens, create_message, model_info, model_list
from attar.serving.http.anthropic.errors import VERSION_HEADER
from attar.serving.http.api_keys import make_api_keys
from attar.serving.http.backend import Backend
from attar.serving.http.chat_endpoint import chat, chat_options
from attar.serving.http.compare import add_compare
from attar.serving.http.embeddings import protocol as of_texts
from attar.serving.http.embeddings.embedders import Embedder
from attar.serving.http.embeddings.endpoint import embeddings, rerank, score
from attar.serving.http.endpoints import complete
from attar.serving.http.engine_state import add_state
from attar.serving.http.error_forms import error_response
from attar.serving.http.errors import ApiError, ErrorBody
from attar.serving.http.llama_cpp.endpoint import make_llama_cpp_routes
from attar.serving.http.lora_adapters import LoadedAdapter, LoraTable, add_lora
from attar.serving.http.metrics import CONTENT_TYPE, Metrics, metrics_text
from attar.serving.http.middleware import (
    BodyLimitMiddleware,
    RequestMiddleware,
    UnexpectedErrorMiddleware,
    allowed_hosts,
    check_host,
    check_key,
)
from attar.serving.http.model_table import (
    MemoryBudget,
    ModelTable,
    NamedModel,
    ServedModel,
)
from attar.serving.http.ollama.routes import add_running, make_ollama_routes
from attar.serving.http.page import add_page
from attar.serving.http.request_body import BodyRoute
from attar.serving.http.responses_api.endpoint import ResponseStore, delete, respond_to, retrieve
from attar.serving.http.responses_api.protocol import DeletedBody, ResponseBody, ResponsesRequest
from attar.serving.http.service import Service
from attar.serving.http.settings import LoraSettings, ServerSettings, TemplateSettings
from attar.serving.http.throughput_log import log_throughput
from attar.serving.http.tokenizer import ServerTokenizer
from attar.serving.http.tool_calls.tool_use import tool_use
from attar.serving.http.transport import ConnectionSettings, add_cors
from attar.serving.services.trace import RequestTracer
from attar.version import __version__

_ERRORS: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorBody, "description": "An error."}}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "The answer."}
}
_UNAVAILABLE: dict[int | str, dict[str, Any]] = {
    503: {"model": bodies.StateBody, "description": "The server is not ready."}
}
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
    answers: TemplateSettings | None = None,
    defaults: Mapping[str, Any] | None = None,
    transport: ConnectionSettings | None = None,
    embedder: Embedder | None = None,
    compare: ServedModel | None = None,
    named: Sequence[NamedModel] = (),
    budget: MemoryBudget | None = None,
    lora: LoraSettings | None = None,
    adapters: Sequence[LoadedAdapter] = (),
    source: str = "",
    tracer: RequestTracer | None = None,
    forward: APIRouter | None = None,
) -> FastAPI:
    """The server's application, for uvicorn or a test.

    Args:
        backend: the engine; closed when the application ends.
        model: the name that clients use, where ``settings.name`` is empty.
        facts: a description of the engine, for /v1/models and /metrics.
        answers: how answers are read.
        defaults: of sampling parameters that a request does not have.
        embedder: makes embeddings; None: the server makes none.
        transport: origins of web pages that may call the server.
        compare: a model to compare with, which answers by its own name too.
        named: models that are loaded when a request names them.
        budget: bytes of all models.
        lora: whether the first model may have adapters, and from where.
        adapters: the adapters that the model has already.
        source: folder, file or hub id of the model.
        tracer: of the requests' spans.
        forward: paths that another server answers, in place of attar's own.

    Raises:
        DataError: the file of keys is wrong.
    """
    settings, answers = settings or ServerSettings(), answers or TemplateSettings()
    name = settings.name or model or "attar"
    keys = make_api_keys(settings.api_key, settings.keys)
    admission = AdmissionControl(backend, settings.max_queue, settings.share)
    metrics = Metrics(backend, name, facts or {})
    service = Service(backend, tokenizer, settings, name, admission, metrics, facts=dict(facts or {}))
    service.embedder, service.source, service.tracer = embedder, source, tracer or RequestTracer()
    service.defaults = dict(defaults or {})
    service.answers, service.volatile_lines = _answers(tokenizer, answers), answers.volatile_line

    def serve(model: ServedModel) -> Service:
        return replace(
            service,
            backend=model.backend,
            tokenizer=model.tokenizer,
            embedder=model.embedder,
            model=model.name,
            source=model.source,
            admission=admission.of(model.backend),
            metrics=Metrics(model.backend, model.name, model.facts),
            facts=dict(model.facts),
            answers=_answers(model.tokenizer, answers),
            defaults=service.defaults if model.defaults is None else dict(model.defaults),
        )

    second = serve(compare) if compare is not None else None
    kept = [second] if second is not None else []
    table = LoraTable(service, lora, adapters) if lora else None
    models = ModelTable(service, kept, named, serve=serve, budget=budget, lora=table)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.openapi()  # built now, not while streams wait
        throughput = asyncio.create_task(
            log_throughput(lambda: [service.metrics for service in models.loaded])
        )
        yield
        throughput.cancel()
        admission.draining = True
        await models.close()
        service.threads.close()

    app = FastAPI(title="attar", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service, app.state.models = service, models
    if forward is not None:
        app.include_router(forward)
    app.include_router(make_routes(models, second))
    add_running(app.router, page=settings.page)
    if settings.page:
        add_page(app.router, key_required=bool(keys))
    _handle_errors(app, service)
    app.add_middleware(BodyLimitMiddleware, max_body=settings.max_body)  # type: ignore[arg-type]
    origins = transport.cors_origin if transport is not None else ()
    checks = [
        partial(check_host, allowed=allowed_hosts(settings), origins=origins),
        partial(check_key, keys=keys),
    ]
    app.add_middleware(RequestMiddleware, checks=checks)  # type: ignore[arg-type]
    app.add_middleware(UnexpectedErrorMiddleware, error_for=service.error_for)  # type: ignore[arg-type]
    add_cors(app, origins)
    app.add_middleware(AccessLogMiddleware, prompts=settings.log_prompts)  # type: ignore[arg-type]
    return app


def _answers(tokenizer: ServerTokenizer, answers: TemplateSettings) -> AnswerForm:
    return AnswerForm.of(tokenizer.template, answers.tool_parser, answers.reasoning_parser)


def _handle_errors(app: FastAPI, service: Service) -> None:
    """Answer every error in the form of its path's API."""

    async def attar_error(request: Request, error: Any) -> JSONResponse:
        return error_response(service.error_for(error), request.scope)

    async def http_error(request: Request, error: Any) -> JSONResponse:
        message = f"{error.detail}: {request.method} {request.url.path[:100]}"
        response = error_response(service.error_for(ApiError(error.status_code, message)), request.scope)
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(ApiError, attar_error)
    app.add_exception_handler(AttarError, attar_error)
    app.add_exception_handler(HTTPException, http_error)


def make_routes(models: ModelTable, second: Service | None = None) -> APIRouter:
    """All paths of the API.

    Args:
        second: the model to compare the first one with.
    """
    router = APIRouter(responses=_ERRORS, route_class=BodyRoute)
    _add_completions(router, models)
    _add_responses(router, models)
    _add_anthropic(router, models)
    _add_embeddings(router, models)
    _add_models(router, models)
    _add_tokenizer(router, models)
    _add_state(router, models)
    router.include_router(make_ollama_routes(models))
    router.include_router(make_llama_cpp_routes(models))
    add_state(router, models.first, second.model if second is not None else None)
    if second is not None:
        add_compare(router, models.first, second)
    if models.lora is not None and models.lora.settings.lora_folder:
        add_lora(router, models.lora, models.names)
    return router


def _add_completions(router: APIRouter, models: ModelTable) -> None:
    @router.post("/v1/completions", response_model=bodies.CompletionBody, responses=_STREAM)
    async def create_completion(body: protocol.CompletionRequest, request: Request) -> Response:
        return await complete(await models.use(body.model, request), body, request)

    @router.post("/v1/chat/completions", response_model=bodies.ChatBody, responses=_STREAM)
    async def create_chat_completion(body: protocol.ChatRequest, request: Request) -> Response:
        return await chat(await models.use(body.model, request), body, request)


def _add_responses(router: APIRouter, models: ModelTable) -> None:
    store = ResponseStore()

    @router.post("/v1/responses", response_model=ResponseBody, responses=_STREAM)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        return await respond_to(await models.use(body.model, request), store, body, request)

    @router.get("/v1/responses/{id}", response_model=ResponseBody)
    async def retrieve_response(id: str, request: Request) -> Response:
        return retrieve(models.first, store, id, request)

    @router.delete("/v1/responses/{id}", response_model=DeletedBody)
    async def delete_response(id: str, request: Request) -> Response:
        return delete(models.first, store, id, request)


def _add_anthropic(router: APIRouter, models: ModelTable) -> None:
    form = {"model": of_anthropic.MessagesErrorBody, "description": "An error."}
    errors: dict[int | str, dict[str, Any]] = {"default": form}

    @router.post("/v1/messages", response_model=of_anthropic.MessageBody, responses=_STREAM | errors)
    async def messages(body: of_anthropic.MessagesRequest, request: Request) -> Response:
        return await create_message(await models.use(body.model, request), body, request)

    @router.post("/v1/messages/count_tokens", response_model=of_anthropic.TokenCountBody, responses=errors)
    async def count_message_tokens(body: of_anthropic.TokenCountRequest, request: Request) -> Response:
        return await count_tokens(await models.use(body.model, request), body, request)


def _add_embeddings(router: APIRouter, models: ModelTable) -> None:
    @router.post("/v1/embeddings", response_model=of_texts.EmbeddingBody)
    async def create_embeddings(body: of_texts.EmbeddingRequest, request: Request) -> Response:
        return await embeddings(await models.use(body.model, request), body, request)

    @router.post("/score", include_in_schema=False)
    @router.post("/v1/score", response_model=of_texts.ScoreBody)
    async def score_pairs(body: of_texts.ScoreRequest, request: Request) -> Response:
        return await score(await models.use(body.model, request), body, request)

    @router.post("/rerank", include_in_schema=False)
    @router.post("/v1/rerank", response_model=of_texts.RerankBody)
    async def rerank_documents(body: of_texts.RerankRequest, request: Request) -> Response:
        return await rerank(await models.use(body.model, request), body, request)


def _add_models(router: APIRouter, models: ModelTable) -> None:
    def card(service: Service) -> bodies.ModelCard:
        return bodies.ModelCard(
            id=service.model,
            created=service.created,
            max_model_len=service.backend.context,
            runtime=service.facts,
        )

    def unloaded(name: str) -> bodies.ModelCard:
        return bodies.ModelCard(id=name, created=models.first.created, loaded=False)

    def adapters() -> list[bodies.ModelCard]:
        loaded = [] if models.lora is None else models.lora.adapters
        base = card(models.first)
        return [base.model_copy(update={"id": adapter.name, "parent": base.id}) for adapter in loaded]

    @router.get("/v1/models", response_model=bodies.ModelList)
    async def list_models(request: Request) -> bodies.ModelList | Response:
        names = models.waiting_to_load
        cards = [*map(card, models.loaded), *map(unloaded, names), *adapters()]
        anthropic = VERSION_HEADER in request.headers
        return JSONResponse(model_list(cards)) if anthropic else bodies.ModelList(data=cards)

    @router.get("/v1/models/{model:path}", response_model=bodies.ModelCard)
    async def retrieve_model(model: str, request: Request) -> bodies.ModelCard | Response:
        models.check_name(model)
        cards = [*map(card, models.loaded), *adapters()]
        model_card = next((loaded for loaded in cards if loaded.id == model), None) or unloaded(model)
        anthropic = VERSION_HEADER in request.headers
        return JSONResponse(model_info(model_card)) if anthropic else model_card


def _add_tokenizer(router: APIRouter, models: ModelTable) -> None:
    @router.post("/tokenize", response_model=bodies.TokenizeBody)
    async def tokenize(body: protocol.TokenizeRequest, request: Request) -> Response:
        service = await models.use(body.model, request)
        with service.admission.preparing(1, service.caller(request)):
            if body.messages is not None:
                tools = tool_use(body.tools, None, None)
                options = chat_options(body, tools, service.answers)
                tokens = await service.encode_chat(body.messages, options)
            elif body.content is not None:
                tokens = await service.encode_text(body.content, None, body.add_special)
            else:
                tokens = await service.encode(body.prompt or "", body.add_special_tokens)
        listed: Any = tokens
        if body.with_pieces:
            listed = await service.threads.run_sized(len(tokens), _pieces, service.tokenizer, tokens)
        context = service.backend.context
        response = bodies.TokenizeBody(count=len(tokens), max_model_len=context, tokens=listed)
        return JSONResponse(response.model_dump())

    @router.post("/detokenize", response_model=bodies.DetokenizeBody)
    async def detokenize(body: protocol.DetokenizeRequest, request: Request) -> Response:
        service = await models.use(body.model, request)
        if any(token >= service.backend.vocabulary for token in body.tokens):
            message = f"a token is outside the vocabulary of {service.backend.vocabulary:,}"
            raise ApiError(400, message, param="tokens", code="invalid_value")
        with service.admission.preparing(1, service.caller(request)):
            decode = service.tokenizer.decode
            text = await service.threads.run_sized(len(body.tokens), decode, body.tokens)
        return JSONResponse({"prompt": text, "content": text})


def _pieces(tokenizer: ServerTokenizer, tokens: Sequence[int]) -> list[bodies.TokenPiece]:
    return [bodies.TokenPiece.of(token, *tokenizer.piece(token)) for token in tokens]


def _add_state(router: APIRouter, models: ModelTable) -> None:
    @router.get("/v1/health", include_in_schema=False)
    @router.get("/health", response_model=bodies.StateBody, responses=_UNAVAILABLE)
    async def health() -> JSONResponse:
        """Whether the process should live: 503 once an engine has stopped."""
        if models.alive:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "stopped", "reason": models.failure_reason()}, status_code=503)

    @router.get("/version")
    async def version() -> bodies.VersionBody:
        """Of attar."""
        return bodies.VersionBody(version=__version__)

    @router.get("/ready", response_model=bodies.StateBody, responses=_UNAVAILABLE)
    async def ready() -> JSONResponse:
        """Whether the server takes new requests: 503 while it drains, or cannot reach its target."""
        draining = models.first.admission.draining or not models.alive
        accepting = not draining and all(service.backend.stats().ready for service in models.loaded)
        status = "ready" if accepting else "draining" if draining else "waiting"
        return JSONResponse({"status": status}, status_code=200 if accepting else 503)

    @router.get("/metrics", response_class=Response, responses=_METRICS)
    async def metrics() -> Response:
        text = metrics_text([service.metrics for service in models.loaded], models.samples())
        return Response(text, headers={"Content-Type": CONTENT_TYPE})
