"""POST /completion and /infill, GET /props and /slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from attar.runtime.sampling.params import SamplingParams
from attar.serving.http.errors import ApiError
from attar.serving.http.infill import infill_ends, infill_prompt
from attar.serving.http.llama_cpp.output import LlamaCppOutput
from attar.serving.http.llama_cpp.protocol import (
    DEFAULTS,
    InfillRequest,
    LlamaCppBody,
    LlamaCppCompletionRequest,
    PromptPart,
)
from attar.serving.http.llama_options import llama_names
from attar.serving.http.model_table import ModelTable
from attar.serving.http.request_body import BodyRoute
from attar.serving.http.request_handler import RequestHandler
from attar.serving.http.responses import respond
from attar.serving.http.service import Service
from attar.serving.http.tool_calls.tool_use import knows_tools
from attar.version import __version__

_SLOTS = 1024  # of a list, at most


def make_llama_cpp_routes(models: ModelTable) -> APIRouter:
    """The paths, which are not in the published document."""
    router = APIRouter(route_class=BodyRoute, include_in_schema=False)

    @router.post("/completions")
    @router.post("/completion")
    async def llama_cpp_completion(body: LlamaCppCompletionRequest, request: Request) -> Response:
        return await complete(await models.use(body.model, request), body, request)

    @router.post("/infill")
    async def llama_cpp_infill(body: InfillRequest, request: Request) -> Response:
        return await infill(await models.use(body.model, request), body, request)

    @router.get("/props")
    async def llama_cpp_props() -> Response:
        return JSONResponse(properties(models.first))

    @router.get("/slots")
    async def llama_cpp_slots(fail_on_no_slot: str = "") -> Response:
        if fail_on_no_slot and not models.first.backend.stats().free:
            raise ApiError(503, "no slot available", code="busy", retry_s=1)
        return JSONResponse(slots(models.first))

    return router


async def complete(service: Service, body: LlamaCppCompletionRequest, request: Request) -> Response:
    """Complete one or several prompts."""
    start, prompts = monotonic(), body.prompts
    if len(prompts) > service.settings.max_prompts:
        message = f"{len(prompts)} prompts in one request; the limit is {service.settings.max_prompts}"
        raise ApiError(400, message, param="prompt", code="too_many_prompts")
    params = _params(service, body)
    with service.admission.preparing(
        service.check_completions(len(prompts), params.n), service.caller(request)
    ):
        ids = [await _encode(service, prompt) for prompt in prompts]
        texts = [await _decode(service, prompt) for prompt in ids]
        handler = await _submit(service, request, params, ids, start)
    return await _answer(handler, body, body.single, texts)


async def infill(service: Service, body: InfillRequest, request: Request) -> Response:
    """Complete the text between a prefix and a suffix."""
    start = monotonic()
    params = replace(_params(service, body), stop_ids=infill_ends(service.tokenizer))
    files = [(file.filename, file.text) for file in body.input_extra]
    with service.admission.preparing(service.check_completions(1, params.n), service.caller(request)):
        ids = await infill_prompt(
            service,
            body.input_prefix,
            body.input_suffix,
            begun=body.prompt,
            files=files,
            param="input_suffix",
        )
        texts = [await _decode(service, ids)]
        handler = await _submit(service, request, params, [ids], start)
    return await _answer(handler, body, params.n == 1, texts)


def properties(service: Service) -> dict[str, Any]:
    """The server as llama.cpp's clients see it; the path of the model is not shown."""
    stats, template = service.backend.stats(), service.tokenizer.template
    return {
        "default_generation_settings": _slot(service, 0, False)
        | {"params": llama_names({**DEFAULTS, **service.defaults})},
        "total_slots": stats.running + stats.free,
        "model_alias": service.model,
        "model_path": service.model,
        "chat_template": template,
        "chat_template_caps": {"supports_tools": knows_tools(template)},
        "modalities": {"vision": False, "audio": False},
        "build_info": f"attar-{__version__}",
        "is_sleeping": False,
    }


def slots(service: Service) -> list[dict[str, Any]]:
    """A row for each sequence that may run; nothing of what it runs."""
    stats = service.backend.stats()
    count = min(stats.running + stats.free, _SLOTS)
    return [_slot(service, number, number < stats.running) for number in range(count)]


def _slot(service: Service, number: int, is_running: bool) -> dict[str, Any]:
    return {
        "id": number,
        "id_task": -1,
        "n_ctx": service.backend.context or 0,
        "speculative": service.backend.stats().speculation is not None,
        "is_processing": is_running,
    }


def _params(service: Service, body: LlamaCppBody) -> SamplingParams:
    params = SamplingParams(**body.all_fields(service.defaults))
    params.fit(service.backend.vocabulary)
    return params


async def _encode(service: Service, prompt: PromptPart) -> list[int]:
    """Token ids of a prompt; the tokenizer's own tokens are around it where it begins with a text."""
    ids: list[int] = []
    for number, part in enumerate(prompt):
        ids += [part] if isinstance(part, int) else await service.encode_text(part, None, special=not number)
    return service.check_prompt(ids)


async def _decode(service: Service, ids: list[int]) -> str:
    text: str = await service.threads.run_sized(len(ids), service.tokenizer.decode, ids)
    return text


async def _submit(
    service: Service, request: Request, params: SamplingParams, ids: list[list[int]], start: float
) -> RequestHandler:
    handler = RequestHandler(service, request, "llama", params, ids, priority=None, start=start)
    await handler.submit()
    return handler


async def _answer(
    handler: RequestHandler, body: LlamaCppBody, single: bool, prompts: Sequence[str]
) -> Response:
    build = partial(LlamaCppOutput, body, handler, prompts, single)
    return await respond(handler, build, stream=body.stream)
