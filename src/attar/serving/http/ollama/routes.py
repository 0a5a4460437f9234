"""The paths of Ollama's API."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from attar.serving.http.model_table import ModelTable
from attar.serving.http.ollama.endpoint import chat, embed, generate, old_embeddings
from attar.serving.http.ollama.models import (
    API_VERSION,
    list_models,
    pull,
    refuse_change,
    running_models,
    show,
)
from attar.serving.http.ollama.protocol import (
    EmbedRequest,
    GenerateRequest,
    OldEmbedRequest,
    OllamaChatRequest,
    PullRequest,
    ShowRequest,
)
from attar.serving.http.request_body import BodyRoute
from attar.version import __version__

RUNNING = "Ollama is running"
"""What clients look for at the server's address."""
READING = ["GET", "HEAD"]


def add_running(router: APIRouter, page: bool) -> None:
    """HEAD of the server's address, by which clients see that it is there; GET where there is no page."""

    @router.api_route("/", methods=["HEAD"] if page else READING, include_in_schema=False)
    async def running() -> Response:
        return PlainTextResponse(RUNNING)


def make_ollama_routes(models: ModelTable) -> APIRouter:
    """The paths under /api, which answer in Ollama's form."""
    router = APIRouter(prefix="/api", route_class=BodyRoute, include_in_schema=False)
    _add_answers(router, models)
    _add_models(router, models)
    return router


def _add_answers(router: APIRouter, models: ModelTable) -> None:
    @router.post("/chat")
    async def ollama_chat(body: OllamaChatRequest, request: Request) -> Response:
        return await chat(models, body, request)

    @router.post("/generate")
    async def ollama_generate(body: GenerateRequest, request: Request) -> Response:
        return await generate(models, body, request)

    @router.post("/embed")
    async def ollama_embed(body: EmbedRequest, request: Request) -> Response:
        return await embed(models, body, request)

    @router.post("/embeddings")
    async def ollama_embeddings(body: OldEmbedRequest, request: Request) -> Response:
        return await old_embeddings(models, body, request)


def _add_models(router: APIRouter, models: ModelTable) -> None:
    @router.api_route("/tags", methods=READING)
    async def ollama_tags() -> Response:
        return await list_models(models)

    @router.api_route("/ps", methods=READING)
    async def ollama_ps() -> Response:
        return await running_models(models)

    @router.api_route("/version", methods=READING)
    async def ollama_version() -> Response:
        return JSONResponse({"version": API_VERSION, "attar": __version__})

    @router.post("/show")
    async def ollama_show(body: ShowRequest, request: Request) -> Response:
        return await show(models, body)

    @router.post("/pull")
    async def ollama_pull(body: PullRequest, request: Request) -> Response:
        return pull(models, body)

    @router.post("/create")
    @router.post("/copy")
    @router.post("/push")
    @router.delete("/delete")
    async def ollama_change() -> Response:
        return refuse_change()
