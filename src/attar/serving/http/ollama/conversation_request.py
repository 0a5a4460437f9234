"""From Ollama's bodies to a request of /v1/chat/completions: messages, tools, format, thinking."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from attar.serving.http.chat_endpoint import NO_REASONING, THINKING_VARIABLES
from attar.serving.http.conversation import ChatMessage
from attar.serving.http.ollama.protocol import (
    AnsweredBody,
    OllamaCall,
    OllamaChatRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaTool,
)
from attar.serving.http.protocol import ChatRequest
from attar.serving.http.service import Service
from attar.serving.http.structured_outputs import JsonSchema, ResponseFormat
from attar.serving.http.tool_calls.protocol import CallBody, CallFunction, FunctionTool


def chat_request(body: AnsweredBody, messages: Sequence[ChatMessage], service: Service) -> ChatRequest:
    """The request to answer a conversation."""
    tools = body.tools if isinstance(body, OllamaChatRequest) else None
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": list(messages),
        "tools": _tools(tools) if tools else None,
        "response_format": response_format(body.format),
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs,
        "reasoning_effort": _effort(body.think),
        "chat_template_kwargs": dict.fromkeys(THINKING_VARIABLES, True) if body.think else None,
        "continue_final_message": _goes_on(messages) or None,
        **(body.options or OllamaOptions.model_validate({})).chat_fields(service.defaults),
    }
    defaults = {name: field.get_default() for name, field in ChatRequest.model_fields.items()}
    return ChatRequest.model_construct(**{**defaults, **fields})  # every part has been checked


def chat_messages(messages: Sequence[OllamaMessage]) -> list[ChatMessage]:
    """The same conversation. Calls without an id get the number of the call; a result without one is that of
    the oldest call of its tool, or of any tool, that has none yet."""
    converted, waiting, count = list[ChatMessage](), list[CallBody](), 0
    for message in messages:
        calls = [_call(call, count + index) for index, call in enumerate(message.tool_calls or ())]
        count, id = count + len(calls), message.tool_call_id
        waiting += calls
        if message.role == "tool":
            named = [call for call in waiting if call.id == id or call.function.name == message.tool_name]
            for call in (named or ([] if id or message.tool_name else waiting))[:1]:
                waiting.remove(call)
                id = id or call.id
        converted.append(
            ChatMessage(
                role=message.role,
                content=message.content,
                reasoning_content=message.thinking,
                name=message.tool_name,
                tool_calls=calls or None,
                tool_call_id=id,
            )
        )
    return converted


def response_format(format: str | dict[str, Any] | None) -> ResponseFormat | None:
    """What holds the answer to a form."""
    if isinstance(format, dict):
        return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=format))
    return ResponseFormat(type="json_object") if format else None


def _call(call: OllamaCall, number: int) -> CallBody:
    arguments = json.dumps(call.function.arguments, ensure_ascii=False)
    function = CallFunction(name=call.function.name, arguments=arguments)
    return CallBody(id=call.id or f"call_{number}", function=function)


def _tools(tools: Sequence[OllamaTool]) -> list[FunctionTool]:
    return [FunctionTool(type="function", function=tool.function) for tool in tools]


def _effort(think: bool | str | None) -> str | None:
    """Templates that read an effort know three."""
    if isinstance(think, str):
        return "high" if think == "max" else think
    return NO_REASONING if think is False else None


def _goes_on(messages: Sequence[ChatMessage]) -> bool:
    """Whether the answer continues a last message of the assistant."""
    last = messages[-1] if messages else None
    return last is not None and last.role == "assistant" and bool(last.content) and not last.tool_calls
