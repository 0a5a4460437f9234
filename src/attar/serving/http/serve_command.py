"""The command line of ``attar serve``, parsed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from socket import socket
from typing import Any

from attar.progress import Progress
from attar.serving.http.settings import (
    EmbeddingSettings,
    LoraSettings,
    ModelsSettings,
    ServerSettings,
    TemplateSettings,
)
from attar.serving.http.transport import ConnectionSettings
from attar.serving.services.settings import ServiceSettings

Show = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ServeCommand:
    """The parsed command line of ``attar serve``.

    Attributes:
        template: the chat template in place of the model's; empty: its own.
        defaults: sampling parameters of requests without their own.
        options: of the engine.
        show: prints a line.
        bound: the port, taken before the model is loaded; None for a unix socket.
    """

    model: str
    settings: ServerSettings
    answers: TemplateSettings
    services: ServiceSettings
    transport: ConnectionSettings
    embeddings: EmbeddingSettings
    template: str
    defaults: dict[str, Any]
    options: dict[str, Any]
    progress: Progress
    show: Show
    models: ModelsSettings = field(default_factory=ModelsSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    bound: socket | None = None
