"""The bodies of POST /v1/responses and of its answers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from attar.serving.http.body_model import StrictModel, field_error
from attar.serving.http.conversation import check_variables
from attar.serving.http.protocol import StreamOptions
from attar.serving.http.tool_calls.protocol import MAX_TOOLS, ToolName


class TextPart(BaseModel):
    """A part of a content; other fields of it are ignored."""

    type: Literal["input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"]
    text: str = ""
    refusal: str = ""


class InputItem(BaseModel):
    """A message, a call, the result of a call, or reasoning: what an earlier response had, may come back."""

    model_config = ConfigDict(strict=True)

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[TextPart] | None = None
    name: str | None = None
    call_id: str | None = None
    arguments: str | None = None
    output: str | list[TextPart] | None = None
    summary: list[TextPart] | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> InputItem:
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "reasoning": (),
        }
        for name in needed[self.type]:
            if getattr(self, name) is None:
                raise field_error(name, f"an item of type {self.type} needs it")
        return self


class ResponseTool(BaseModel):
    """A function that the model may call; OpenAI's own tools do not exist here."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(BaseModel):
    """``tool_choice``: this function and no other."""

    type: Literal["function"]
    name: str


class ChosenTools(BaseModel):
    """``tool_choice``: some of the functions, one of which must be called or may."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MAX_TOOLS)]


class TextFormat(BaseModel):
    """``text.format``: free text, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(StrictModel):
    """``text``."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(BaseModel):
    """``reasoning``; its effort is a variable of templates that read it."""

    effort: str | None = None


class ResponsesRequest(StrictModel):
    """The body of POST /v1/responses."""

    USED: ClassVar[tuple[str, ...]] = ("store", "metadata")  # which other endpoints ignore

    model: str
    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | ChosenTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    # vLLM's
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)

    @model_validator(mode="after")
    def _check_supported(self) -> ResponsesRequest:
        check_variables(self.chat_template_kwargs or {})
        if self.background:
            raise field_error("background", "background is not supported: ask, and wait or stream")
        if self.truncation == "auto":
            raise field_error("truncation", "truncation 'auto' is not supported: leave items out yourself")
        return self


class ResponseUsageBody(BaseModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseBody(BaseModel):
    """A response; the fields of the request are repeated in it."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    usage: ResponseUsageBody | None = None


class DeletedBody(BaseModel):
    """The answer to a DELETE."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool
