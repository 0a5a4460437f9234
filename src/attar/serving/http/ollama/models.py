"""The models of a server as Ollama lists them: /api/tags, /api/show, /api/ps, and what would change them."""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from starlette.responses import JSONResponse, Response

from attar.checkpoint import open_checkpoint
from attar.checkpoint.description import Inspection
from attar.checkpoint.inspect import inspect
from attar.checkpoint.units import count_text
from attar.errors import AttarError
from attar.runtime.loading import tokenizer_of
from attar.serving.http.answer import AnswerForm
from attar.serving.http.errors import ApiError
from attar.serving.http.infill import infill_tokens
from attar.serving.http.llama_options import llama_names
from attar.serving.http.model_table import ModelTable
from attar.serving.http.ollama.endpoint import model_named
from attar.serving.http.ollama.output import NDJSON
from attar.serving.http.ollama.protocol import OllamaBody, PullRequest, tagged
from attar.serving.http.responses import dump_json
from attar.serving.http.service import Service
from attar.serving.http.tokenizer import ServerTokenizer
from attar.serving.http.tool_calls.tool_use import knows_tools

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class ModelFacts:
    """Of a model.

    Attributes:
        size: bytes on the disk.
        modified: seconds since 1970.
        digest: SHA-256 of source, size and time; not of the weights, which would all have to be read.
        info: the keys of GGUF's metadata that clients read.
        causal: whether it completes text; otherwise it makes embeddings.
    """

    source: str
    format: str = ""
    family: str = ""
    size: int = 0
    modified: float = 0.0
    parameters: int = 0
    quantization: str = ""
    context: int | None = None
    info: dict[str, Any] | None = None
    causal: bool = True

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr((self.source, self.size, self.modified)).encode()).hexdigest()

    def details(self, parent: str = "") -> dict[str, Any]:
        """``details`` of a model.

        Args:
            parent: name of the model that an adapter is for.
        """
        return {
            "parent_model": parent,
            "format": self.format,
            "family": self.family,
            "families": [self.family] if self.family else [],
            "parameter_size": count_text(self.parameters).replace(" ", "") if self.parameters else "",
            "quantization_level": self.quantization,
        }


@lru_cache(maxsize=256)
def model_facts(source: str) -> ModelFacts:
    """The facts of a model that the server serves; few where its files cannot be read now.

    Args:
        source: folder, file or hub id; empty: not known.
    """
    try:
        return _facts_of(source, inspect(source)) if source else ModelFacts(source)
    except (AttarError, OSError):
        return ModelFacts(source)


@lru_cache(maxsize=16)
def tokenizer_for(source: str) -> ServerTokenizer | None:
    """The tokenizer of a model that is not loaded; None where it cannot be read."""
    try:
        tokenizer = tokenizer_of(open_checkpoint(source)) if source else None
    except (AttarError, OSError):
        return None
    return None if tokenizer is None else ServerTokenizer(tokenizer)


def _facts_of(source: str, seen: Inspection) -> ModelFacts:
    container, shape = seen.container, asdict(seen.geometry)
    keys = {
        "context_length": "context",
        "embedding_length": "hidden",
        "block_count": "layers",
        "attention.head_count": "heads",
        "attention.head_count_kv": "kv_heads",
        "vocab_size": "vocabulary",
    }
    lengths = {f"{seen.model_type}.{key}": shape[name] for key, name in keys.items()}
    general = {"general.architecture": seen.model_type, "general.parameter_count": seen.parameters}
    return ModelFacts(
        source=source,
        format="gguf" if container else "safetensors",
        family=seen.model_type,
        size=seen.disk_bytes,
        modified=seen.path.stat().st_mtime,
        parameters=seen.parameters,
        quantization=_quantization(seen),
        context=seen.geometry.context,
        info=general | {key: number for key, number in lengths.items() if number is not None},
        causal=seen.geometry.causal,
    )


def _quantization(seen: Inspection) -> str:
    """``Q4_0`` of a GGUF file, ``INT4`` of codes, else the dtype."""
    if seen.container:
        return str(seen.container["file_type"]).split(" ")[0]
    schemes = (seen.quantization or {}).get("schemes") or [{}]
    if schemes[0].get("bits"):
        return f"{schemes[0].get('type') or 'int'}{schemes[0]['bits']}".upper()
    return _DTYPES.get(seen.dtype, seen.dtype.upper())


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
