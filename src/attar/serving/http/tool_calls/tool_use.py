"""The tools of one request: which ones the model is shown, which it may call, and whether it must."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attar.serving.http.errors import ApiError
from attar.serving.http.tool_calls.protocol import AllowedChoice, FunctionTool, NamedTool

_LEAD = "You can call these tools:"
_RULE = (
    "To call tools, answer with nothing but a JSON list of calls, "
    '[{"name": TOOL, "arguments": {...}}, ...]. Without need of a tool, answer in plain text.'
)


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request.

    Args:
        shown: for the chat template.
        parameters: of the tools that may be called, by name; None: any object.
        forced: the answer is calls, and nothing else.
        named: the request names the one tool to call.
        parallel: an answer may have several calls.
    """

    shown: tuple[dict[str, Any], ...]
    parameters: Mapping[str, Any]
    forced: bool = False
    named: bool = False
    parallel: bool = True


def tool_use(
    tools: Sequence[FunctionTool] | None,
    choice: str | NamedTool | AllowedChoice | None,
    parallel: bool | None,
) -> ToolUse | None:
    """The tools of a request; None: it has none, or wants none.

    Raises:
        ApiError: a choice without tools, or of a tool that is not among them; two tools of one name.
    """
    if not tools or choice == "none":
        if choice not in (None, "none", "auto"):
            raise _wrong("tool_choice", "it asks for a call, but there are no tools")
        return None
    parameters = {tool.function.name: tool.function.parameters for tool in tools}
    if len(parameters) < len(tools):
        raise _wrong("tools", "two tools have the same name")
    named, required = isinstance(choice, NamedTool), choice == "required"
    if isinstance(choice, NamedTool | AllowedChoice):
        allowed = [choice] if isinstance(choice, NamedTool) else choice.allowed_tools.tools
        names = [tool.function.name for tool in allowed]
        missing = [name for name in names if name not in parameters]
        if missing:
            raise _wrong("tool_choice", f"{missing[0][:100]!r} is none of the tools")
        parameters = {name: parameters[name] for name in names}
        required = named or (isinstance(choice, AllowedChoice) and choice.allowed_tools.mode == "required")
    return ToolUse(
        tuple(tool.plain() for tool in tools),
        parameters,
        forced=required,
        named=named,
        parallel=parallel is not False and not named,
    )


def _wrong(param: str, reason: str) -> ApiError:
    return ApiError(400, f"Invalid value for {param!r}: {reason}", param=param, code="invalid_value")


def knows_tools(template: str) -> bool:
    """Whether a chat template shows tools and calls by itself."""
    return "tools" in template or "tool_calls" in template


def listed_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Tools in words, for a chat template that knows none."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return f"{_LEAD}\n{listed}\n{_RULE}"


def as_words(message: Mapping[str, Any]) -> dict[str, Any]:
    """A call or a result as the text of a message of a role that every template knows."""
    if message["role"] in ("tool", "function"):
        name = f" of {message['name']}" if message.get("name") else ""
        return {"role": "user", "content": f"Result{name}: {message['content']}"}
    written = [_call_text(call.get("function", call)) for call in message["tool_calls"]]
    return {"role": message["role"], "content": f"{message['content']}\n[{', '.join(written)}]".strip()}


def _call_text(function: Mapping[str, Any]) -> str:
    """A call in JSON; arguments that are none are a string."""
    name = json.dumps(function.get("name"), ensure_ascii=False)
    arguments = function.get("arguments") or "{}"
    try:
        json.loads(arguments)
    except (ValueError, TypeError, RecursionError):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {name}, "arguments": {arguments}}}'
