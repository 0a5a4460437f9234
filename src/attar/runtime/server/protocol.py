"""Bodies of requests and responses, as OpenAI documents them, with fields of vLLM (``top_k``, ``min_p``).

As at OpenAI an unknown field is refused by name. Fields without effect here (``user``, ``store``, ...) are
accepted and ignored. Fields that are not supported (``tools``, ``suffix``, ...) are refused unless empty.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator
from pydantic_core import PydanticCustomError

from attar.runtime.sampling.params import MAX_LOGPROBS, MAX_N, MAX_STOP_CHARACTERS, MAX_STOPS
from attar.runtime.server.token_sources import AttarOptions, TokenSources

StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0)]
TokenName = Annotated[int, Field(ge=0, strict=False)]  # JSON's keys are strings
Bias = Annotated[float, Field(ge=-100, le=100)]
LogitBias = Annotated[dict[TokenName, Bias], Field(max_length=300)]  # as at OpenAI
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions alone


def _field_error(param: str, message: str) -> PydanticCustomError:
    """The error of a check of several fields, with the field that it names."""
    return PydanticCustomError("wrong_value", "{message}", {"message": message, "param": param})


class StrictModel(BaseModel):
    """Unknown fields, NaN, infinity and numbers in quotes are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class JsonSchema(BaseModel):
    """``response_format.json_schema``."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """Free text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is given with, and only with, type json_schema")
        return self

    def schema_text(self) -> str | None:
        """The JSON schema of the completion; None: free text."""
        if self.json_schema is not None:
            return json.dumps(self.json_schema.schema_)
        return '{"type": "object"}' if self.type == "json_object" else None


class StreamOptions(StrictModel):
    """``include_usage``: the last chunk has the token counts."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingRequest(StrictModel):
    """Fields of both endpoints."""

    model: str
    n: int | None = Field(None, ge=1, le=MAX_N)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: LogitBias | None = None
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    response_format: ResponseFormat | None = None
    # vLLM's
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: int | None = Field(None, ge=0)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS)] | None = None
    skip_special_tokens: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)
    attar: AttarOptions | None = None  # attar's own
    # ignored
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stops(cls, stop: Any) -> Any:
        listed = stop if isinstance(stop, list) else [stop]
        if stop is not None and not all(isinstance(item, str) for item in listed[: MAX_STOPS + 1]):
            raise ValueError("it is a text or a list of texts")
        if len(listed) > MAX_STOPS:
            raise ValueError(f"{len(listed):,} texts; the limit is {MAX_STOPS}")
        if stop is not None and not all(1 <= len(item) <= MAX_STOP_CHARACTERS for item in listed):
            raise ValueError(f"each text has 1 to {MAX_STOP_CHARACTERS:,} characters")
        return stop

    @model_validator(mode="after")
    def _check_stream_options(self) -> SamplingRequest:
        if self.stream_options is not None and not self.stream:
            raise _field_error("stream_options", "stream_options is allowed only where stream is true")
        return self


class CompletionRequest(SamplingRequest):
    """The body of POST /v1/completions."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_N)
    suffix: str | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, prompt: Any) -> Any:
        parts = prompt if isinstance(prompt, list) else [prompt]
        if not parts or any(part in ("", []) for part in parts):
            raise ValueError("a prompt must not be empty")
        kinds = {type(part) for part in parts}
        if len(kinds) > 1 or not kinds <= ({str} if parts is not prompt else {str, int, list}):
            raise ValueError("it is a text, a list of texts, a list of token ids or a list of such lists")
        for ids in parts if kinds == {list} else [parts] if kinds == {int} else []:
            if any(type(token) is not int or token < 0 for token in ids):
                raise ValueError("token ids are whole numbers from 0")
        return prompt

    @model_validator(mode="after")
    def _check_supported(self) -> CompletionRequest:
        if self.suffix:
            raise _field_error("suffix", "suffix is not supported: the model continues texts")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise _field_error("best_of", "best_of is not supported beyond n")
        if self.echo and self.stream and self.logprobs is not None:
            raise _field_error("echo", "echo with logprobs is not supported where stream is true")
        if self.max_tokens == 0 and (not self.echo or self.stream):
            raise _field_error("max_tokens", "max_tokens may be 0 only where echo is true and stream is not")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Texts or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class ContentPart(StrictModel):
    """A part of a message's content."""

    type: Literal["text", "refusal"]
    text: str = ""
    refusal: str = ""


class ChatMessage(StrictModel):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    # in answers of some servers, which clients send back
    function_call: None = None
    annotations: Any = None
    audio: None = None

    def plain(self) -> dict[str, Any]:
        """For a chat template: parts joined, role ``developer`` as ``system``."""
        parts = self.content if isinstance(self.content, list) else []
        text = "".join(part.text or part.refusal for part in parts)
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": text if isinstance(self.content, list) else self.content or "",
        }
        extra = {"name": self.name, "tool_call_id": self.tool_call_id, "tool_calls": self.tool_calls}
        return message | {key: value for key, value in extra.items() if value is not None}


class ChatRequest(SamplingRequest):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None

    @model_validator(mode="after")
    def _check_supported(self) -> ChatRequest:
        if self.tools or self.functions or self.tool_choice not in (None, "none", "auto"):
            raise _field_error("tools", "tools are not supported")
        if self.modalities not in (None, [], ["text"]):
            raise _field_error("modalities", "modalities must be ['text']")
        if self.top_logprobs and not self.logprobs:
            raise _field_error("top_logprobs", "top_logprobs is allowed only where logprobs is true")
        return self


class TokenizeRequest(StrictModel):
    """The body of POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise _field_error("prompt", "give prompt or messages")
        return self


class DetokenizeRequest(StrictModel):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


FinishReasonBody = Literal["stop", "length"]


class PromptDetails(BaseModel):
    """Prefix cache hits, in prompt tokens."""

    cached_tokens: int


class UsageBody(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None


class CompletionChoice(BaseModel):
    """A completion."""

    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: FinishReasonBody | None
    stop_reason: str | int | None = None
    attar: TokenSources | None = None


class CompletionBody(BaseModel):
    """The response of /v1/completions, and each of its chunks."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | None = None


class AnswerMessage(BaseModel):
    """The model's message."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """A chat completion."""

    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None = None
    finish_reason: FinishReasonBody | None
    stop_reason: str | int | None = None
    attar: TokenSources | None = None


class ChatBody(BaseModel):
    """The response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody | None = None


class ModelCard(BaseModel):
    """A model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "attar"
    max_model_len: int | None = None
    runtime: dict[str, Any] = {}


class ModelList(BaseModel):
    """The model of this server."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeBody(BaseModel):
    """The response of /tokenize."""

    count: int
    max_model_len: int | None
    tokens: list[int]


class DetokenizeBody(BaseModel):
    """The response of /detokenize."""

    prompt: str


class StateBody(BaseModel):
    """The response of /health and /ready."""

    status: str
    reason: str | None = None
