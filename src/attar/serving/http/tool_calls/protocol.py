"""Tools in the bodies of requests and responses, as OpenAI documents them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

MAX_TOOLS = 128  # as at OpenAI
ToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:/-]+$", max_length=128)]


class ToolFunction(BaseModel):
    """What a tool does, and the JSON schema of its arguments.

    ``strict`` is accepted: where a call is forced its arguments always follow the schema.
    """

    model_config = ConfigDict(strict=True)

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(BaseModel):
    """A tool that the model may call."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: ToolFunction

    def plain(self) -> dict[str, Any]:
        """For a chat template, in the order that models have been taught."""
        names = ("name", "description", "parameters")
        fields = {name: getattr(self.function, name) for name in names}
        return {"type": "function", "function": {k: v for k, v in fields.items() if v is not None}}


class NamedFunction(BaseModel):
    """The name of a tool."""

    name: str


class NamedTool(BaseModel):
    """``tool_choice``: this tool and no other."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(BaseModel):
    """``tool_choice.allowed_tools``: some of the tools, one of which must be called or may."""

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(BaseModel):
    """``tool_choice``: these tools and no others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class CallFunction(BaseModel):
    """The tool that is called, and its arguments in JSON."""

    name: str
    arguments: str = ""

    @field_validator("arguments", mode="before")
    @classmethod
    def _as_text(cls, arguments: Any) -> Any:
        return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


class CallBody(BaseModel):
    """A call of a tool, in an answer and in the messages of the next request."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CallFunction

    def plain(self) -> dict[str, Any]:
        """For a chat template, arguments as text."""
        function = {"name": self.function.name, "arguments": self.function.arguments or "{}"}
        call = {"type": "function", "function": function}
        return call if self.id is None else {"id": self.id, **call}
