"""Bodies of requests, as OpenAI documents them, with fields of vLLM (``top_k``, ``min_p``).

As at OpenAI an unknown field is refused by name. Fields without effect here (``user``, ``store``, ...) are
accepted and ignored. Fields that are not supported (``functions``, ``suffix``, ...) are refused unless empty.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from attar.runtime.sampling.params import MAX_LOGPROBS, MAX_N, MAX_STOP_CHARACTERS, MAX_STOPS
from attar.serving.http.body_model import StrictModel, field_error
from attar.serving.http.conversation import ChatMessage, check_chat_options
from attar.serving.http.structured_outputs import ResponseFormat, StructuredOutputs
from attar.serving.http.tool_calls.protocol import MAX_TOOLS, AllowedChoice, FunctionTool, NamedTool

StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0)]
TokenName = Annotated[int, Field(ge=0, strict=False)]  # JSON's keys are strings
Bias = Annotated[float, Field(ge=-100, le=100)]
LogitBias = Annotated[dict[TokenName, Bias], Field(max_length=300)]  # as at OpenAI
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions alone


IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity"),
    *("prompt_cache_retention", "prediction", "web_search_options", "extra_body", "extra_headers"),
    *("keep_alive", "num_ctx", "request_id", "spaces_between_special_tokens", "mm_processor_kwargs"),
    *(
        "drop_params",
        "include",
        "function_call",
        "max_tool_calls",
        "custom_llm_provider",
        "cache_prompt",
        "num_retries",
        "timeout",
    ),
)
"""Fields of OpenAI and of frameworks that change no answer here; a response header names those given."""


class StreamOptions(StrictModel):
    """``include_usage``: the last chunk has the token counts."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class AttarOptions(StrictModel):
    """``attar`` of a request. ``tokens``: token ids and proposers are in the answer."""

    tokens: bool | None = None


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
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    structured_outputs: StructuredOutputs | None = None
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
    def _check_options(self) -> SamplingRequest:
        if self.truncate_prompt_tokens == 0:
            raise field_error("truncate_prompt_tokens", "it is a number from 1, or -1: what fits")
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "stream_options is allowed only where stream is true")
        return self


def check_prompts(prompt: Any) -> Any:
    """A prompt or several, unchanged.

    Raises:
        ValueError: it is something else.
    """
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
        return check_prompts(prompt)

    @model_validator(mode="after")
    def _check_supported(self) -> CompletionRequest:
        if self.suffix:
            raise field_error("suffix", "suffix is not supported: the model continues texts")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise field_error("best_of", "best_of is not supported beyond n")
        if self.echo and self.stream and self.logprobs is not None:
            raise field_error("echo", "echo with logprobs is not supported where stream is true")
        if self.max_tokens == 0 and (not self.echo or self.stream):
            raise field_error("max_tokens", "max_tokens may be 0 only where echo is true and stream is not")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Texts or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class ChatRequest(SamplingRequest):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    # vLLM's
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _check_tool_choice(cls, choice: Any) -> Any:
        function = choice.get("function") if isinstance(choice, dict) else None
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        allowed = isinstance(choice, dict) and choice.get("type") == "allowed_tools"
        if (
            choice in (None, "none", "auto", "required")
            or (named and choice.get("type") == "function")
            or allowed
        ):
            return choice
        message = "it is none, auto, required or an object like"
        raise ValueError(f'{message} {{"type": "function", "function": {{"name": ...}}}}')

    @model_validator(mode="after")
    def _check_supported(self) -> ChatRequest:
        if self.functions:
            raise field_error("functions", "functions are not supported: give them as tools")
        if self.modalities not in (None, [], ["text"]):
            raise field_error("modalities", "modalities must be ['text']")
        check_chat_options(self)
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", "top_logprobs is allowed only where logprobs is true")
        return self

    @classmethod
    def of_checked(cls, **fields: Any) -> ChatRequest:
        """The request of another API, whose parser has checked every part."""
        defaults = {name: field.get_default() for name, field in cls.model_fields.items()}
        return cls.model_construct(**{**defaults, **fields})


class TokenizeRequest(StrictModel):
    """The body of POST /tokenize: a prompt, messages, or llama.cpp's ``content``."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None  # llama.cpp's, as are the next three
    add_special: bool = False
    parse_special: Literal[True] = True
    with_pieces: bool = False
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _check_input(self) -> TokenizeRequest:
        if [self.prompt, self.messages, self.content].count(None) != 2:
            raise field_error("prompt", "give prompt, messages or content")
        check_chat_options(self)
        return self


class DetokenizeRequest(StrictModel):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
