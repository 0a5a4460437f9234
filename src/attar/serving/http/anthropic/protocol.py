"""The bodies of POST /v1/messages and /v1/messages/count_tokens, and of their answers, as Anthropic documents
them. Fields of blocks and tools that are not listed (``cache_control``, ``citations``, ...) are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from attar.runtime.sampling.params import MAX_STOPS
from attar.serving.http.body_model import StrictModel, field_error
from attar.serving.http.protocol import StopString
from attar.serving.http.tool_calls.protocol import MAX_TOOLS, ToolName

NonEmpty = Annotated[str, StringConstraints(min_length=1)]


class ReadModel(BaseModel):
    """A part of a request whose further fields are ignored."""

    model_config = ConfigDict(strict=True)

    READ: ClassVar[tuple[str, ...]] = ()  # values of ``type`` that are read

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if cls.READ and isinstance(kind, str) and kind not in cls.READ:
            listed = ", ".join(cls.READ)
            raise field_error("type", f"{kind[:40]!r} cannot be read here, only {listed}")
        return part


class TextBlock(ReadModel):
    """Text of a system prompt or of a tool's result."""

    READ = ("text",)

    type: Literal["text"]
    text: str


class ContentBlock(ReadModel):
    """A block of a message. Thinking of an earlier answer goes back to the template; what is redacted is left
    out."""

    READ = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
    NEEDED: ClassVar[dict[str, tuple[str, ...]]] = {
        "text": ("text",),
        "thinking": ("thinking",),
        "tool_use": ("id", "name", "input"),
        "tool_result": ("tool_use_id",),
    }

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str | None = None
    id: NonEmpty | None = None
    name: NonEmpty | None = None
    input: Any = None
    tool_use_id: NonEmpty | None = None
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> ContentBlock:
        for name in self.NEEDED.get(self.type, ()):
            if getattr(self, name) is None:
                raise field_error(name, f"a block of type {self.type} needs it")
        return self


class MessageParam(ReadModel):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]

    @property
    def blocks(self) -> list[ContentBlock]:
        """Its content; a text is a block."""
        if isinstance(self.content, str):
            return [ContentBlock(type="text", text=self.content)]
        return self.content


class MessagesTool(ReadModel):
    """A tool that the model may call; tools that Anthropic defines or runs do not exist here."""

    READ = ("custom",)

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]


class MessagesToolChoice(ReadModel):
    """``tool_choice``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> MessagesToolChoice:
        if self.type == "tool" and self.name is None:
            raise field_error("name", "type tool needs it")
        return self


class ThinkingConfig(ReadModel):
    """``thinking``. ``adaptive`` and ``between_tools`` leave it to the model, as ``enabled`` does here."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class SchemaFormat(ReadModel):
    """``output_config.format``."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(ReadModel):
    """``output_config``."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: SchemaFormat | None = None


class TokenCountRequest(StrictModel):
    """The body of POST /v1/messages/count_tokens."""

    IGNORED: ClassVar[tuple[str, ...]] = (
        *("cache_control", "context_management", "diagnostics", "inference_geo", "metadata", "service_tier"),
        *("speed", "user_profile_id"),
    )

    model: str
    messages: Annotated[list[MessageParam], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(TokenCountRequest):
    """The body of POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0)


class TokenCountBody(BaseModel):
    """Tokens of a prompt."""

    input_tokens: int


class MessageUsage(BaseModel):
    """Token counts: the prompt's are ``input_tokens`` and ``cache_read_input_tokens`` together."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int]


class MessageBody(BaseModel):
    """An answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class MessagesErrorBody(BaseModel):
    """The body of every error response."""

    type: Literal["error"]
    error: dict[str, str]
    request_id: str
