"""Command lines of ``attar serve --engine vllm``, as vLLM gets them."""

from __future__ import annotations

from attar.progress import SILENT
from attar.runtime.settings import EngineSettings
from attar.serving.http.settings import (
    EmbeddingSettings,
    ServeCommand,
    ServerSettings,
    TemplateSettings,
)
from attar.serving.http.transport import ConnectionSettings
from attar.serving.http.vllm.flags import vllm_options
from attar.serving.services.settings import ServiceSettings


def options(model, engine=None, template="", parts=None, **server):
    """Of a command line; ``parts`` are fields of the command."""
    given = {
        "model": "org/model",
        "settings": ServerSettings(**{"engine": "vllm", **server}),
        "answers": TemplateSettings(),
        "services": ServiceSettings(),
        "transport": ConnectionSettings(),
        "embeddings": EmbeddingSettings(),
        "options": EngineSettings(**(engine or {})).options(),
        **(parts or {}),
    }
    others = {"template": "", "defaults": {}, "progress": SILENT, "show": print}
    return vllm_options(ServeCommand(**given, **others), model, template)
