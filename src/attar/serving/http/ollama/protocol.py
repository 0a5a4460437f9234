"""Bodies of requests, as Ollama documents them. As at Ollama an unknown field is no error; it is noted.

``model`` is called ``name`` by old clients.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from attar.serving.http.body_model import StrictModel, field_error
from attar.serving.http.embeddings.protocol import MAX_TEXTS
from attar.serving.http.llama_options import LlamaOptions, WholeNumber, noted_fields
from attar.serving.http.protocol import TokenId
from attar.serving.http.tool_calls.protocol import MAX_TOOLS, ToolFunction

LATEST = ":latest"


def tagged(name: str) -> str:
    """The name with a tag: ``small`` is ``small:latest``; ``attar:tiny`` has one."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def find_model(name: str, names: Iterable[str]) -> str | None:
    """The model that a client means by a name; None: there is none. The same spelling goes first."""
    candidates = list(names)
    if name in candidates:
        return name
    wanted = tagged(name).casefold()
    return next((candidate for candidate in candidates if tagged(candidate).casefold() == wanted), None)


DEFAULTS: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's, where neither the request nor the model's generation_config.json says anything."""


class OllamaOptions(LlamaOptions):
    """Those with an effect here; the others are noted."""

    num_predict: WholeNumber | None = None
    num_ctx: Annotated[WholeNumber, Field(ge=0)] | None = None

    def chat_fields(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of a request to /v1/chat/completions.

        Args:
            defaults: of sampling parameters, of the model.
        """
        missing = {name: value for name, value in DEFAULTS.items() if name not in defaults}
        limit = {"max_completion_tokens": self.num_predict} if (self.num_predict or 0) > 0 else {}
        return missing | self.sampling_fields() | limit


_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)"
_DURATION = re.compile(rf"[+-]?(?:0|(?:{_PART})+)", re.ASCII)


def keep_seconds(value: float | str | None) -> float:
    """Seconds; infinite for a negative value, as at Ollama, and without one.

    Raises:
        ValueError: a text that is no duration in Go's notation.
    """
    if value is None:
        return math.inf
    if isinstance(value, str):
        if len(value) > 100 or not _DURATION.fullmatch(value):
            raise ValueError("it is a number of seconds or a duration such as 5m, 1h30m or -1s")
        seconds = sum(float(number) * _UNITS[unit] for number, unit in re.findall(_PART, value))
        value = -seconds if value.startswith("-") else seconds
    return math.inf if value < 0 else value


Think = Literal["low", "medium", "high", "max"]
NO_IMAGES = "images cannot be read: this model takes text alone"


class OllamaBody(StrictModel):
    """What all bodies share."""

    model_config = ConfigDict(extra="allow")
    ANY_MEDIA_TYPE: ClassVar[bool] = True  # Ollama's own examples with curl send a form's

    model: str = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _read_name(cls, body: Any) -> Any:
        if not isinstance(body, dict) or body.get("model"):
            return body
        name = body.get("name")
        return {key: value for key, value in body.items() if key != "name"} | (
            {"model": name} if name else {}
        )

    @property
    def ignored_fields(self) -> list[str]:
        """Names of the fields without an effect, for a header."""
        return noted_fields(self.model_extra)


class KeptBody(OllamaBody):
    """Of a request that uses a model."""

    USED: ClassVar[tuple[str, ...]] = ("keep_alive",)  # which other endpoints ignore

    keep_alive: float | str | None = None
    options: OllamaOptions | None = None

    @field_validator("keep_alive")
    @classmethod
    def _check_keep_alive(cls, value: float | str | None) -> float | str | None:
        keep_seconds(value)
        return value

    @property
    def keep_s(self) -> float:
        """Seconds for which the caller keeps the model."""
        return keep_seconds(self.keep_alive)

    @property
    def ignored_fields(self) -> list[str]:
        """With those of ``options``."""
        options = {} if self.options is None else self.options.model_extra or {}
        return noted_fields(self.model_extra) + [f"options.{name}" for name in noted_fields(options)]


class AnsweredBody(KeptBody):
    """Of a request that the model answers."""

    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    think: bool | Think | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncate: bool | None = None

    @field_validator("think", mode="before")
    @classmethod
    def _check_think(cls, value: Any) -> Any:
        if value is None or isinstance(value, bool) or value in ("low", "medium", "high", "max"):
            return value
        raise ValueError("it is true, false, low, medium, high or max")

    @field_validator("format")
    @classmethod
    def _check_format(cls, value: Any) -> Any:
        if isinstance(value, str) and value not in ("", "json"):
            raise ValueError("it is 'json' or a JSON schema")
        return value

    @property
    def streams(self) -> bool:
        """As at Ollama, unless the request says no."""
        return self.stream is not False


class OllamaCallFunction(BaseModel):
    """The tool that is called."""

    model_config = ConfigDict(strict=True)

    name: str
    arguments: dict[str, Any] = {}


class OllamaCall(BaseModel):
    """A call of a tool."""

    model_config = ConfigDict(strict=True)

    id: str | None = None
    function: OllamaCallFunction


class OllamaMessage(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(strict=True)

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    @field_validator("role", mode="before")
    @classmethod
    def _lower(cls, role: Any) -> Any:
        return role.lower() if isinstance(role, str) else role

    @field_validator("images")
    @classmethod
    def _check_images(cls, images: Any) -> Any:
        if images:
            raise ValueError(NO_IMAGES)
        return images


class OllamaTool(BaseModel):
    """A tool that the model may call."""

    model_config = ConfigDict(strict=True)

    type: str = "function"
    function: ToolFunction


class OllamaChatRequest(AnsweredBody):
    """The body of POST /api/chat; without messages it loads the model, or unloads it."""

    messages: list[OllamaMessage] | None = None
    tools: Annotated[list[OllamaTool], Field(max_length=MAX_TOOLS)] | None = None


class GenerateRequest(AnsweredBody):
    """The body of POST /api/generate; without a prompt it loads the model, or unloads it."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[TokenId] | None = None
    raw: bool | None = None
    images: list[Any] | None = None

    @model_validator(mode="after")
    def _check_supported(self) -> GenerateRequest:
        if self.images:
            raise field_error("images", NO_IMAGES)
        if self.raw and (self.template or self.system or self.context):
            raise field_error("raw", "raw mode has no template, system or context")
        if self.template:
            reason = "a request cannot bring a template; attar serve --chat-template FILE gives the model one"
            raise field_error("template", reason)
        return self


class EmbedRequest(KeptBody):
    """The body of POST /api/embed; without texts it loads the model."""

    input: str | Annotated[list[str], Field(max_length=MAX_TEXTS)] | None = None
    truncate: bool | None = None
    dimensions: int | None = Field(None, ge=0)

    @property
    def texts(self) -> list[str]:
        """To be embedded."""
        return self.input if isinstance(self.input, list) else [self.input] if self.input else []


class OldEmbedRequest(KeptBody):
    """The body of POST /api/embeddings."""

    prompt: str | None = None


class ShowRequest(OllamaBody):
    """The body of POST /api/show."""


class PullRequest(OllamaBody):
    """The body of POST /api/pull."""

    stream: bool | None = None
