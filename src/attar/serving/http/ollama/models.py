"""The models of a server as Ollama lists them: /api/tags, /api/show, /api/ps, and what would change them."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.responses import JSONResponse, Response

from attar.serving.http.answer import AnswerForm
from attar.serving.http.errors import ApiError
from attar.serving.http.infill import infill_tokens
from attar.serving.http.llama_options import llama_names
from attar.serving.http.model_table import ModelTable
from attar.serving.http.ollama.endpoint import model_named
from attar.serving.http.ollama.model_facts import ModelFacts, model_facts, tokenizer_for
from attar.serving.http.ollama.model_names import tagged
from attar.serving.http.ollama.output import NDJSON
from attar.serving.http.ollama.protocol import OllamaBody, PullRequest
from attar.serving.http.responses import dump_json
from attar.serving.http.service import Service
from attar.serving.http.tokenizer import ServerTokenizer
from attar.serving.http.tool_calls.tool_use import knows_tools

API_VERSION = "0.13.0"
"""Of Ollama, whose API this follows; clients choose by it what they send."""
FOREVER = "9999-12-31T23:59:59Z"
_MOST_S = 10.0**9  # later is forever


async def list_models(models: ModelTable) -> Response:
    """All models, loaded or not."""
    rows = []
    for name, source in models.sources.items():
        facts = await _facts(models, source)
        rows.append(_row(name, facts, _parent(models, name)) | {"modified_at": _time(facts.modified)})
    return JSONResponse({"models": rows})


async def running_models(models: ModelTable) -> Response:
    """The loaded models, and how long they stay."""
    rows = []
    for name, source in models.sources.items():
        service = models.loaded_service(name)
        if service is None:
            continue
        row = _row(name, await _facts(models, source), _parent(models, name))
        context = service.backend.context or 0
        rows.append(
            row | {"expires_at": _end(models.kept_s(name)), "size_vram": 0, "context_length": context}
        )
    return JSONResponse({"models": rows})


async def show(models: ModelTable, body: OllamaBody) -> Response:
    """What is known of a model; it is not loaded for it."""
    name = model_named(models, body.model)
    source, service = models.sources[name], models.loaded_service(name)
    facts = await _facts(models, source)
    if service is None:
        tokenizer = await models.first.threads.run_sized(1 << 20, tokenizer_for, source)
    else:
        tokenizer = service.tokenizer
    template = "" if tokenizer is None else tokenizer.template
    context = service.backend.context if service is not None else facts.context
    answer = {
        "modelfile": f"# a model of attar serve; it cannot be changed here\nFROM {tagged(name)}",
        "parameters": "\n".join(_parameters(service, context)),
        "template": template,
        "details": facts.details(_parent(models, name)),
        "model_info": facts.info or {},
        "capabilities": capabilities(tokenizer, service, facts),
        "modified_at": _time(facts.modified),
    }
    return JSONResponse(answer)


def capabilities(tokenizer: ServerTokenizer | None, service: Service | None, facts: ModelFacts) -> list[str]:
    """What a model can do, by Ollama's words."""
    template = "" if tokenizer is None else tokenizer.template
    answers = service.answers if service is not None else AnswerForm.of(template)
    embeds = not facts.causal if service is None else service.embedder is not None
    insert = tokenizer is not None and infill_tokens(tokenizer) is not None
    able = {
        "completion": facts.causal,
        "tools": facts.causal and knows_tools(template),
        "insert": facts.causal and insert,
        "thinking": answers.tags is not None or answers.calls.channels,
        "embedding": embeds,
    }
    return [word for word, is_able in able.items() if is_able]


def pull(models: ModelTable, body: PullRequest) -> Response:
    """Clients pull before they chat: a model that is there is a success, another one is not fetched."""
    model_named(models, body.model)
    if body.stream is False:
        return JSONResponse({"status": "success"})
    lines = [dump_json({"status": status}) for status in ("pulling manifest", "success")]
    return Response("".join(f"{line}\n" for line in lines), media_type=NDJSON)


def refuse_change() -> Response:
    """Raise ApiError (400): models are not made, copied, sent or deleted through the API."""
    message = "the models are those that the server was started with (--named-model, --model-folder)"
    raise ApiError(400, message, code="not_supported")


async def _facts(models: ModelTable, source: str) -> ModelFacts:
    facts: ModelFacts = await models.first.threads.run_small(model_facts, source)
    return facts


def _row(name: str, facts: ModelFacts, parent: str) -> dict[str, Any]:
    names = {"name": tagged(name), "model": tagged(name)}
    return names | {"size": facts.size, "digest": facts.digest, "details": facts.details(parent)}


def _parent(models: ModelTable, name: str) -> str:
    """The model of an adapter."""
    return tagged(models.first.model) if models.lora is not None and name in models.lora else ""


def _parameters(service: Service | None, context: int | None) -> list[str]:
    values: dict[str, Any] = {} if context is None else {"num_ctx": context}
    defaults = {} if service is None else llama_names(service.defaults)
    return [f"{name:<30} {value}" for name, value in (values | defaults).items()]


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _end(seconds: float) -> str:
    if math.isinf(seconds) or seconds > _MOST_S:
        return FOREVER
    return _time((datetime.now(UTC) + timedelta(seconds=seconds)).timestamp())
