"""The OpenAI-compatible server, and the verb ``serve``.

    HTTP → middleware → app (routes) → endpoints → service (tokenize, check) → request_handler → backend
    engine's events → request_handler (queue) → responses (JSON or SSE) with endpoints → HTTP

Only this package imports fastapi. It uses the engine through the Protocol of ``backend.py``, so its tests
need no model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attar.errors import MissingExtraError, SettingsError
from attar.progress import SILENT, Progress
from attar.serving.http.limits import read_limits
from attar.serving.http.settings import (
    EmbeddingSettings,
    LoraSettings,
    ModelsSettings,
    ServeCommand,
    ServerSettings,
    TemplateSettings,
)
from attar.serving.http.transport import ConnectionSettings
from attar.serving.services.settings import ServiceSettings
from attar.serving.services.trace import tracer_of_environment

KEY_VARIABLE = "ATTAR_API_KEY"


def serve(
    model: str,
    settings: ServerSettings | None = None,
    answers: TemplateSettings | None = None,
    services: ServiceSettings | None = None,
    transport: ConnectionSettings | None = None,
    embeddings: EmbeddingSettings | None = None,
    models: ModelsSettings | None = None,
    lora: LoraSettings | None = None,
    *,
    limits_file: str | Path | None = None,
    progress: Progress = SILENT,
    show: Callable[[str], None] = print,
    **options: Any,
) -> None:
    """Serve a model until a signal arrives.

    Args:
        model: a folder, a ``.gguf`` file, a hub id or ``attar:tiny``.
        settings: of the server; the variable ATTAR_API_KEY adds keys, separated by commas.
        answers: how prompts are made, and answers read.
        services: which other processes take part, and the role of this one.
        transport: a unix socket, TLS, web pages of other origins.
        embeddings: how texts become embeddings.
        models: further models, by name.
        lora: adapters of the model, by name.
        limits_file: bounds and times (:mod:`attar.serving.http.limits`), which take the place of those
            of ``settings``, ``lora`` and ``options``.
        show: called with lines: what runs the model, the address, warnings.
        options: of the engine: the keyword arguments of :class:`attar.runtime.llm.LLM`.

    Raises:
        MissingExtraError: fastapi, uvicorn or prometheus-client is not installed; or grpcio, where other
            services take part; or vllm, where it is the engine.
        ModelError: the model has no tokenizer.
        RecipeError: the file of limits is wrong; names file and line.
        SettingsError: there is no parser of this name; or others could load adapters without a key.
        OutputError: the port cannot be opened.
        DataError: the file of keys, of the chat template or of generation settings is wrong.
        AttarError: as :class:`attar.runtime.llm.LLM`.
    """
    settings, lora = settings or ServerSettings(), lora or LoraSettings()
    if limits_file is not None:
        bounds = read_limits(limits_file)
        settings, lora = (
            replace(settings, **bounds.of(bounds.server)),
            replace(lora, **bounds.of(bounds.loras)),
        )
        scheduling = options.get("limits") or bounds.scheduling.limits()
        options["limits"] = replace(scheduling, **bounds.of(bounds.scheduling))
    settings, transport = with_environment_keys(settings), transport or ConnectionSettings()
    if settings.unix_socket and transport.tls_cert:
        raise SettingsError("tls_cert", transport.tls_cert, "left out with a unix socket")
    _check_extra()
    services = services or ServiceSettings()
    embeddings = embeddings or EmbeddingSettings()
    services.check_with(options, settings.compare, embeddings.of_causal if services.role else None)
    if services:
        _check_extra(("grpc",), "services")
    from attar.checkpoint import open_checkpoint
    from attar.serving.http.model_defaults import read_template, sampling_defaults
    from attar.serving.http.roles import SERVERS
    from attar.serving.http.run import bind

    open_to_others = not settings.loopback and not settings.api_key and not settings.keys
    if lora and services.role is not None:
        raise SettingsError("lora", services.role, "a server without --role")
    if lora.lora_folder and open_to_others:
        raise SettingsError(
            "lora_folder", lora.lora_folder, f"a key ({KEY_VARIABLE}), or an address of this machine"
        )
    answers = answers or TemplateSettings()
    template = read_template(answers.chat_template) if answers.chat_template else ""
    defaults = sampling_defaults(answers.generation_config, open_checkpoint(model).path)
    if open_to_others:
        warning = "can be reached by other machines, and no key is required"
        show(f"warning: {settings.host} {warning}; set {KEY_VARIABLE}")
    command = ServeCommand(
        model=model,
        settings=settings,
        answers=answers,
        services=services,
        transport=transport,
        embeddings=embeddings,
        models=models or ModelsSettings(),
        lora=lora,
        template=template,
        defaults=defaults,
        options=options,
        progress=progress,
        show=show,
        bound=bind(settings),
        tracer=tracer_of_environment(os.environ, show),
    )
    try:
        SERVERS["vllm" if settings.engine != "attar" else services.role](command)
    finally:
        command.tracer.close()


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


def _check_extra(
    packages: Sequence[str] = ("fastapi", "uvicorn", "prometheus_client"), extra: str = "serve"
) -> None:
    """Raise MissingExtraError before a model is loaded."""
    for package in packages:
        try:
            __import__(package)
        except ImportError:
            raise MissingExtraError(package, extra) from None
