"""Input items of a response to the messages of a chat, and the request to one of chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attar.serving.http.conversation import ChatMessage
from attar.serving.http.protocol import ChatRequest
from attar.serving.http.responses_api.protocol import (
    ChosenTool,
    ChosenTools,
    InputItem,
    ResponsesRequest,
    TextFormat,
    TextPart,
)
from attar.serving.http.structured_outputs import JsonSchema, ResponseFormat
from attar.serving.http.tool_calls.protocol import (
    AllowedChoice,
    AllowedTools,
    CallBody,
    CallFunction,
    FunctionTool,
    NamedFunction,
    NamedTool,
    ToolFunction,
)


def input_items(body: ResponsesRequest) -> list[InputItem]:
    """The items of a request; a text is a message of the user."""
    if isinstance(body.input, str):
        return [InputItem(role="user", content=body.input)]
    return list(body.input)


def messages_of(items: Sequence[InputItem], instructions: str | None) -> list[ChatMessage]:
    """The conversation. Reasoning, text and calls that follow each other are one message of the assistant."""
    messages = [ChatMessage(role="system", content=instructions)] if instructions else []
    for item in items:
        if item.type == "function_call_output":
            messages.append(ChatMessage(role="tool", content=_text(item.output), tool_call_id=item.call_id))
        elif item.type == "message" and item.role != "assistant":
            assert item.role is not None
            messages.append(ChatMessage(role=item.role, content=_text(item.content)))
        else:
            last = messages[-1] if messages else None
            if last is None or last.role != "assistant" or (item.type == "message" and last.content):
                last = ChatMessage(role="assistant")
                messages.append(last)
            _add_to(last, item)
    return [message for message in messages if message.role != "assistant" or _says_something(message)]


def chat_request(body: ResponsesRequest, messages: Sequence[ChatMessage]) -> ChatRequest:
    """The same request, of chat completions."""
    choice: Any = body.tool_choice
    if isinstance(choice, ChosenTool):
        choice = _named(choice)
    elif isinstance(choice, ChosenTools):
        allowed = AllowedTools(mode=choice.mode, tools=list(map(_named, choice.tools)))
        choice = AllowedChoice(type="allowed_tools", allowed_tools=allowed)
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": list(messages),
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
        "tools": _tools(body),
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _format(body.text.format if body.text else None),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "chat_template_kwargs": body.chat_template_kwargs,
        "priority": body.priority,
    }
    return ChatRequest.of_checked(**fields)


def _named(tool: ChosenTool) -> NamedTool:
    return NamedTool(type="function", function=NamedFunction(name=tool.name))


def _tools(body: ResponsesRequest) -> list[FunctionTool] | None:
    if body.tools is None:
        return None
    fields = ("name", "description", "parameters", "strict")
    functions = [ToolFunction(**{name: getattr(tool, name) for name in fields}) for tool in body.tools]
    return [FunctionTool(type="function", function=function) for function in functions]


def _format(wanted: TextFormat | None) -> ResponseFormat | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return ResponseFormat(type="json_object")
    schema = JsonSchema(name=wanted.name, schema=wanted.schema_ or {})
    return ResponseFormat(type="json_schema", json_schema=schema)


def _add_to(message: ChatMessage, item: InputItem) -> None:
    """Add reasoning, text or a call of the assistant's to its message."""
    if item.type == "reasoning":
        message.reasoning_content = _text(item.content) or _text(item.summary)
    elif item.type == "message":
        message.content = _text(item.content)
    else:
        function = CallFunction(name=item.name or "", arguments=item.arguments or "")
        message.tool_calls = [*(message.tool_calls or []), CallBody(id=item.call_id, function=function)]


def _says_something(message: ChatMessage) -> bool:
    return bool(message.content or message.tool_calls)


def _text(content: str | list[TextPart] | None) -> str:
    if isinstance(content, list):
        return "".join(part.text or part.refusal for part in content)
    return content or ""
