"""The OpenAI-compatible server, and the verb ``serve``.

    HTTP → middleware → app (routes) → endpoints → service (tokenize, check) → request_handler → backend
    engine's events → request_handler (queue) → responses (JSON or SSE) with endpoints → HTTP

Only this package imports fastapi. It uses the engine through the Protocol of ``backend.py``, so its tests
need no model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from attar.errors import MissingExtraError, ModelError, SettingsError
from attar.progress import SILENT, Progress
from attar.runtime.server.settings import ServerSettings
from attar.runtime.speculate.settings import SpeculationSettings

if TYPE_CHECKING:
    from attar.runtime.server.app import ServedModel

KEY_VARIABLE = "ATTAR_API_KEY"


def serve(
    model: str,
    settings: ServerSettings | None = None,
    *,
    progress: Progress = SILENT,
    show: Callable[[str], None] = print,
    **options: Any,
) -> None:
    """Serve a model until a signal arrives.

    Args:
        model: a folder, a ``.gguf`` file, a hub id or ``attar:tiny``.
        settings: of the server; the variable ATTAR_API_KEY adds keys, separated by commas.
        show: called with lines: what runs the model, the address, warnings.
        options: of the engine: the keyword arguments of :class:`attar.runtime.llm.LLM`.

    Raises:
        MissingExtraError: fastapi, uvicorn or prometheus-client is not installed.
        ModelError: the model has no tokenizer.
        OutputError: the port cannot be opened.
        DataError: the file of keys is wrong.
        AttarError: as :class:`attar.runtime.llm.LLM`.
    """
    settings = with_environment_keys(settings or ServerSettings())
    _check_extra()
    from attar.runtime.llm import LLM
    from attar.runtime.server.app import create_app
    from attar.runtime.server.backend import EngineBackend
    from attar.runtime.server.run import run
    from attar.runtime.server.tokenizer import ServerTokenizer

    with progress.task("load", total=1) as task:
        llm = LLM(model, **options)
        task.advance()
    if llm.tokenizer is None:
        raise ModelError(f"{model} has no tokenizer, so it cannot be served")
    description = llm.describe()
    tokenizer = ServerTokenizer(llm.tokenizer, special=settings.allow_special_tokens)
    backend = EngineBackend(llm.streams())
    second = _second_model(model, settings, options, progress) if settings.compare else None
    facts = description.to_dict()
    app = create_app(backend, settings, tokenizer=tokenizer, model=model, facts=facts, second=second)
    for line in description.lines():
        show(line)
    if second is not None:
        show(f"compare     {second.name}")
    if not settings.loopback and not settings.api_key and not settings.keys:
        warning = "can be reached by other machines, and no key is required"
        show(f"warning: {settings.host} {warning}; set {KEY_VARIABLE}")
    run(app, settings, show)


def _second_model(
    model: str, settings: ServerSettings, options: dict[str, Any], progress: Progress
) -> ServedModel:
    """The model of ``--compare``, with the first one's options.

    Raises:
        SettingsError: it is the first one; else as :func:`serve`.
    """
    from attar.runtime.llm import LLM
    from attar.runtime.server.app import ServedModel
    from attar.runtime.server.backend import EngineBackend
    from attar.runtime.server.tokenizer import ServerTokenizer

    name = settings.compare
    if name in (model, settings.name):
        raise SettingsError("compare", name, "another model than the first")
    speculation = {field.name for field in fields(SpeculationSettings)}
    with progress.task("load", total=1) as task:
        llm = LLM(name, **{key: value for key, value in options.items() if key not in speculation})
        task.advance()
    if llm.tokenizer is None:
        raise ModelError(f"{name} has no tokenizer, so it cannot be served")
    tokenizer = ServerTokenizer(llm.tokenizer, special=settings.allow_special_tokens)
    return ServedModel(name, EngineBackend(llm.streams()), tokenizer, llm.describe().to_dict())


def with_environment_keys(settings: ServerSettings) -> ServerSettings:
    """The settings with the keys of the variable ATTAR_API_KEY added.

    Raises:
        SettingsError: a key that is not allowed.
    """
    value = os.environ.get(KEY_VARIABLE, "")
    keys = tuple(key.strip() for key in value.split(",") if key.strip())
    if value and not keys:
        raise SettingsError(KEY_VARIABLE, "(not shown)", "one or more keys with commas between them")
    return replace(settings, api_key=(*settings.api_key, *keys))


def _check_extra() -> None:
    """Raise MissingExtraError before a model is loaded."""
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        try:
            __import__(package)
        except ImportError:
            raise MissingExtraError(package, "serve") from None
