"""Settings of the server, and its parsed command line; imports neither torch nor fastapi."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field
from socket import socket
from typing import Any

from attar.checkpoint.units import byte_count
from attar.errors import SettingsError
from attar.options import setting
from attar.progress import Progress
from attar.serving.http.transport import ConnectionSettings
from attar.serving.services.settings import ServiceSettings
from attar.serving.services.trace import RequestTracer

VERSION = 1
MIB = 1 << 20
UNIX = "unix:"
ENGINES = ("attar", "vllm")


def is_key(text: object) -> bool:
    """Whether a text is a valid API key."""
    printable = isinstance(text, str) and text.isascii() and text.isprintable()
    return printable and len(str(text)) >= 8 and " " not in str(text)


@dataclass(frozen=True, kw_only=True)
class LimitSettings:
    """What requests may take and do: bounds, and times in seconds."""

    max_body: int = setting(MIB, "bytes of a request at most")
    max_prompts: int = setting(64, "prompts in one completion request at most")
    max_texts: int = setting(128, "completions of one request, prompts times n, at most")
    max_queue: int = setting(256, "completions that may wait; more get 429")
    max_connections: int = setting(1024, "open connections; idle ones make room for new ones")
    client_share: float = setting(
        0.0,
        "fraction of all completions and connections that one key or address may hold; "
        "0: half where several may call, else all",
    )
    header_s: float = setting(10.0, "seconds for a request's headers")
    body_s: float = setting(30.0, "seconds for a request's body")
    idle_s: float = setting(30.0, "seconds that a connection may be idle")
    write_s: float = setting(60.0, "seconds for a client to read a piece of its answer")
    request_s: float = setting(0.0, "seconds a request may take; 0: any time")
    drain_s: float = setting(30.0, "seconds that running requests get on SIGTERM")
    alive_s: float = setting(15.0, "seconds of silence before a stream sends a comment")
    priority: bool = setting(False, "every request may have a priority")
    allow_special_tokens: bool = setting(False, "special tokens in messages are special tokens, not text")

    def __post_init__(self) -> None:
        for name, least, most in _RANGES:
            value = getattr(self, name)
            if not least <= value <= most:
                allowed = f"from {least:g} to {most:g}" if most < float("inf") else f"at least {least:g}"
                raise SettingsError(name, value, allowed)


@dataclass(frozen=True, kw_only=True)
class ServerSettings(LimitSettings):
    """Address, callers and limits of the server."""

    host: str = setting("127.0.0.1", "address to listen on; unix:PATH: a unix socket")
    port: int = setting(8000, "port; 0: any that is free")
    name: str = setting("", "the model's name for clients; empty: MODEL as it is written")
    api_key: tuple[str, ...] = setting(
        (),
        "key that clients must send, 8 characters at least; the variable ATTAR_API_KEY "
        "hides it from ps; none: everybody may call, unless there is a file of keys",
    )
    keys: str = setting("", "file of keys with limits of their own")
    allowed_host: tuple[str, ...] = setting((), "name by which browsers may call it, besides localhost")
    compare: str = setting("", "a second model, for comparisons: same options, without speculation")
    engine: str = setting(
        "attar",
        "attar, or vllm: vLLM's server as a child process, behind this one; its own options "
        "follow in the same text: 'vllm -tp 2'",
    )
    page: bool = setting(True, "a page for people at /")
    log_prompts: bool = setting(False, "write prompts to the log")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.port <= 65535:
            raise SettingsError("port", self.port, "from 0 to 65535")
        for key in self.api_key:
            if not is_key(key):
                raise SettingsError(
                    "api_key", "(not shown)", "8 or more printable ASCII characters, no blanks"
                )
        if not self.host or self.host == UNIX:
            raise SettingsError("host", self.host, "an address or a name")
        if self.engine.partition(" ")[0] not in ENGINES:
            raise SettingsError("engine", self.engine, "attar, or vllm and options of its own")

    @property
    def share(self) -> float:
        """Fraction of all completions and connections that one caller may hold."""
        keys = len(self.api_key) + 2 * bool(self.keys)
        several = keys > 1 or (not keys and not self.loopback)
        return self.client_share or (0.5 if several else 1.0)

    @property
    def unix_socket(self) -> str:
        """Path of the unix socket to listen on; "": a port."""
        return self.host.removeprefix(UNIX) if self.host.startswith(UNIX) else ""

    @property
    def address(self) -> str:
        """The address to listen on with a port, for other services too."""
        return "127.0.0.1" if self.unix_socket else self.host

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.unix_socket:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@dataclass(frozen=True, kw_only=True)
class ModelsSettings:
    """Further models, by the names that requests give."""

    named_model: tuple[str, ...] = setting((), "NAME=PATH: a further model, loaded when a request names it")
    model_folder: str = setting("", "folder whose models are further ones, by the names they have there")
    model_memory: str = setting(
        "", "memory of all models, such as 6GB: those used least recently make room; empty: no limit"
    )

    def __post_init__(self) -> None:
        byte_count("model_memory", self.model_memory)
        if len(self.paths) < len(self.named_model):
            raise SettingsError("named_model", " ".join(self.named_model), "each name once")

    @property
    def paths(self) -> dict[str, str]:
        """Models by name.

        Raises:
            SettingsError: what is not NAME=PATH.
        """
        return dict(_named_path("named_model", text) for text in self.named_model)


@dataclass(frozen=True, kw_only=True)
class LoraLimitSettings:
    """How many LoRA adapters a model may have."""

    max_loras: int = setting(16, "adapters that are loaded at the same time")

    def __post_init__(self) -> None:
        if self.max_loras < 1:
            raise SettingsError("max_loras", self.max_loras, "at least 1")


@dataclass(frozen=True, kw_only=True)
class LoraSettings(LoraLimitSettings):
    """LoRA adapters of the model, by the names that requests give."""

    lora: tuple[str, ...] = setting((), "NAME=PATH: an adapter that peft wrote")
    lora_folder: str = setting(
        "", "requests may load adapters from below this folder, and unload all; empty: neither"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.paths) < len(self.lora):
            raise SettingsError("lora", " ".join(self.lora), "each name once")
        if len(self.lora) > self.max_loras:
            raise SettingsError("lora", f"{len(self.lora)} adapters", f"max_loras={self.max_loras} at most")

    def __bool__(self) -> bool:
        """Whether the model may have adapters."""
        return bool(self.lora or self.lora_folder)

    @property
    def paths(self) -> dict[str, str]:
        """Adapters by name.

        Raises:
            SettingsError: what is not NAME=PATH.
        """
        return dict(_named_path("lora", text) for text in self.lora)


def _named_path(setting: str, text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not name or not path or not name.isprintable():
        raise SettingsError(setting, text, "NAME=PATH")
    return name, path


@dataclass(frozen=True, kw_only=True)
class EmbeddingSettings:
    """How texts become embeddings."""

    pooling: str = setting(
        "auto",
        "what an embedding is made of: mean, last (causal models), cls (encoders), none; "
        "auto: what an encoder's folder says, none for causal models",
        choices=("auto", "none", "mean", "last", "cls"),
    )

    @property
    def of_causal(self) -> str | None:
        """Of a causal model; None: it makes no embeddings.

        Raises:
            SettingsError: it is of encoders alone.
        """
        if self.pooling == "cls":
            raise SettingsError("pooling", self.pooling, "mean, last or none for a causal model")
        return self.pooling if self.pooling in ("mean", "last") else None


@dataclass(frozen=True, kw_only=True)
class TemplateSettings:
    """How conversations become prompts, and completions become answers."""

    chat_template: str = setting(
        "",
        "file of a chat template in place of the model's own; plain: the messages' texts alone, "
        "for a model that continues text",
    )
    generation_config: str = setting(
        "auto",
        "sampling parameters of requests without their own; auto: the model's "
        "generation_config.json; none; or a file",
    )
    tool_parser: str = setting(
        "auto",
        "form of calls of tools: harmony, hermes, qwen_xml, pythonic, llama3, mistral or json; "
        "auto: by the chat template",
    )
    reasoning_parser: str = setting(
        "auto", "tags around reasoning: think, mistral, seed or none; auto: by the chat template"
    )
    volatile_line: tuple[str, ...] = setting(
        (),
        "start of a line of system prompts that changes from request to request, such as "
        "'Current time:'; such lines come behind the conversation, so that cached prefixes are reused",
    )

    def __post_init__(self) -> None:
        if not all(start.strip() for start in self.volatile_line):
            raise SettingsError("volatile_line", "", "the words with which the line begins")


_RANGES: tuple[tuple[str, float, float], ...] = (  # inclusive
    ("max_body", 1024, float("inf")),
    ("max_queue", 1, float("inf")),
    ("max_prompts", 1, float("inf")),
    ("max_texts", 1, float("inf")),
    ("client_share", 0, 1),
    ("max_connections", 1, float("inf")),
    ("header_s", 0.01, 1e9),
    ("body_s", 0.01, 1e9),
    ("idle_s", 0.01, 1e9),
    ("write_s", 0.01, 1e9),
    ("request_s", 0, 1e9),
    ("drain_s", 0, 1e9),
    ("alive_s", 0.01, 1e9),
)


@dataclass(frozen=True, kw_only=True)
class ServeCommand:
    """The parsed command line of ``attar serve``.

    Attributes:
        template: the chat template in place of the model's; empty: its own.
        defaults: sampling parameters of requests without their own.
        options: of the engine.
        show: prints a line.
        bound: the port, taken before the model is loaded; None for a unix socket.
        tracer: of the requests' spans.
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
    show: Callable[[str], None]
    models: ModelsSettings = field(default_factory=ModelsSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    bound: socket | None = None
    tracer: RequestTracer = field(default_factory=RequestTracer)
