"""Blocks of content to the messages of a chat, and the request to one of chat completions.

Messages of one role that follow each other are one. Blocks of text become paragraphs. Each ``tool_use`` has
its ``tool_result`` in the message that follows, before any text, as at Anthropic.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from attar.serving.http.anthropic.protocol import (
    ContentBlock,
    MessageParam,
    MessagesRequest,
    MessagesTool,
    MessagesToolChoice,
    TextBlock,
    ThinkingConfig,
    TokenCountRequest,
)
from attar.serving.http.chat_endpoint import NO_REASONING, THINKING_VARIABLES
from attar.serving.http.conversation import ChatMessage
from attar.serving.http.errors import ApiError
from attar.serving.http.protocol import ChatRequest
from attar.serving.http.structured_outputs import JsonSchema, ResponseFormat
from attar.serving.http.tool_calls.protocol import (
    CallBody,
    CallFunction,
    FunctionTool,
    NamedFunction,
    NamedTool,
    ToolFunction,
)

BILLING = "x-anthropic-billing-header:"
"""Claude Code's line for Anthropic's accounting at the head of a system prompt. It is not for the model, and
changes at every request, which would end the reuse of cached prefixes."""
PARAGRAPH = "\n\n"
ERROR = "Error: "
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = {"xhigh": "high", "max": "high"}  # which no template knows
_BUDGETS = ((1024, "low"), (2048, "medium"))  # LiteLLM's table of efforts and budgets

LocatedBlock = tuple[str, ContentBlock]
"""A block with its path in the request."""


def chat_request(body: TokenCountRequest) -> ChatRequest:
    """The same request, of chat completions.

    Raises:
        ApiError: 400, blocks that do not go together.
    """
    messages, choice = messages_of(body), body.tool_choice
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "tools": None if body.tools is None else [_tool(tool) for tool in body.tools],
        "tool_choice": None if choice is None else _choice(choice),
        "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
        "continue_final_message": messages[-1].role == "assistant" or None,
        **_thinking(body),
    }
    wanted = body.output_config.format if body.output_config is not None else None
    if wanted is not None:
        schema = JsonSchema(schema=wanted.schema_)
        fields["response_format"] = ResponseFormat(type="json_schema", json_schema=schema)
    if isinstance(body, MessagesRequest):
        fields["stop"] = body.stop_sequences
        names = ("max_tokens", "temperature", "top_p", "top_k", "stream")
        fields |= {name: getattr(body, name) for name in names}
    return ChatRequest.of_checked(**fields)


def messages_of(body: TokenCountRequest) -> list[ChatMessage]:
    """The conversation.

    Raises:
        ApiError: 400, blocks that do not go together; names the block.
    """
    system = _system(body.system)
    listed = [ChatMessage(role="system", content=system)] if system else []
    waiting = dict[str, str]()  # calls without results: path by id
    known = set[str]()
    first = True
    for role, blocks in _turns(body.messages):
        if role == "system":
            listed += _system_message(blocks)
        elif role == "user":
            listed += _user_messages(blocks, waiting)
        elif first:
            raise _wrong("messages.0.role", "the first message is the user's")
        else:
            listed += _assistant_messages(blocks, waiting, known)
        first = first and role == "system"
    for id, path in waiting.items():
        raise _unanswered(id, path)
    if all(message.role == "system" for message in listed):
        raise _wrong("messages", "none of them is the user's")
    return listed


def _turns(messages: Sequence[MessageParam]) -> list[tuple[str, list[LocatedBlock]]]:
    """Blocks of messages of one role that follow each other."""
    turns: list[tuple[str, list[LocatedBlock]]] = []
    for number, message in enumerate(messages):
        if message.role == "user" and not message.content:
            raise _wrong(f"messages.{number}.content", "it is empty")
        blocks = [(f"messages.{number}.content.{index}", block) for index, block in enumerate(message.blocks)]
        if turns and turns[-1][0] == message.role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((message.role, blocks))
    return turns


def _user_messages(blocks: Sequence[LocatedBlock], waiting: dict[str, str]) -> list[ChatMessage]:
    """Results of calls, which leave ``waiting``, and the user's text."""
    results, texts = list[ChatMessage](), list[str]()
    for path, block in blocks:
        if block.type == "tool_result":
            id = str(block.tool_use_id)
            if texts:
                raise _wrong(path, "results of tools come before the text of a message")
            if waiting.pop(id, None) is None:
                reason = f"{id[:100]!r} is no tool_use of the message before, or has its result already"
                raise _wrong(f"{path}.tool_use_id", reason)
            results.append(ChatMessage(role="tool", content=_result(block), tool_call_id=id))
        elif block.type == "text":
            texts.append(block.text or "")
        else:
            raise _wrong(f"{path}.type", f"a block of type {block.type} is the assistant's")
    for id, path in waiting.items():
        raise _unanswered(id, path)
    text = PARAGRAPH.join(filter(None, texts))
    if not (results or text):
        raise _wrong(blocks[0][0], "the message has no text")
    return [*results, ChatMessage(role="user", content=text)] if text else results


def _assistant_messages(
    blocks: Sequence[LocatedBlock], waiting: dict[str, str], known: set[str]
) -> list[ChatMessage]:
    """An answer, whose calls are added to ``waiting``; none where it is empty, as an answer may have been."""
    calls, texts, thoughts = list[CallBody](), list[str](), list[str]()
    for path, block in blocks:
        if block.type == "tool_use":
            id = str(block.id)
            if id in known:
                raise _wrong(f"{path}.id", f"two blocks have the id {id[:100]!r}")
            known.add(id)
            waiting[id] = path
            arguments = json.dumps(block.input, ensure_ascii=False)
            calls.append(CallBody(id=id, function=CallFunction(name=block.name or "", arguments=arguments)))
        elif block.type == "tool_result":
            raise _wrong(f"{path}.type", "results of tools are in messages of the user")
        else:
            texts.append(block.text or "")
            thoughts.append(block.thinking or "")
    text = "".join(texts)
    if not (text or calls):
        return []
    message = ChatMessage(role="assistant", content=text, tool_calls=calls or None)
    message.reasoning_content = PARAGRAPH.join(filter(None, thoughts)) or None
    return [message]


def _system_message(blocks: Sequence[LocatedBlock]) -> list[ChatMessage]:
    for path, block in blocks:
        if block.type != "text":
            raise _wrong(f"{path}.type", f"a block of type {block.type} is none of a system message")
    text = _joined([block.text or "" for _, block in blocks])
    return [ChatMessage(role="system", content=text)] if text else []


def _system(system: str | list[TextBlock] | None) -> str:
    return _joined([system or ""] if isinstance(system, str | None) else [block.text for block in system])


def _joined(texts: Sequence[str]) -> str:
    """Texts of a system prompt, without Claude Code's line for Anthropic's accounting."""
    kept = [text.partition("\n")[2] if text.startswith(BILLING) else text for text in texts]
    return PARAGRAPH.join(filter(None, kept))


def _result(block: ContentBlock) -> str:
    parts = block.content if isinstance(block.content, list) else []
    text = PARAGRAPH.join(filter(None, (part.text for part in parts))) if parts else str(block.content or "")
    marked = not block.is_error or text[: len(ERROR) - 2].casefold() == ERROR[:-2].casefold()
    return text if marked else ERROR + text


def _thinking(body: TokenCountRequest) -> dict[str, Any]:
    """``thinking`` and the effort as variables of templates."""
    thinking = body.thinking
    if thinking is not None and thinking.type == "disabled":
        return {"reasoning_effort": NO_REASONING}
    effort = body.output_config.effort if body.output_config is not None else None
    variables = None if thinking is None else dict.fromkeys(THINKING_VARIABLES, True)
    chosen = _EFFORTS.get(effort, effort) if effort is not None else _effort(thinking)
    return {"reasoning_effort": chosen, "chat_template_kwargs": variables}


def _effort(thinking: ThinkingConfig | None) -> str | None:
    budget = None if thinking is None else thinking.budget_tokens
    if budget is None:
        return None
    return next((effort for most, effort in _BUDGETS if budget <= most), "high")


def _tool(tool: MessagesTool) -> FunctionTool:
    function = ToolFunction(name=tool.name, description=tool.description, parameters=tool.input_schema)
    return FunctionTool(type="function", function=function)


def _choice(choice: MessagesToolChoice) -> str | NamedTool:
    if choice.type == "tool":
        return NamedTool(type="function", function=NamedFunction(name=choice.name or ""))
    return _CHOICES[choice.type]


def _unanswered(id: str, path: str) -> ApiError:
    return _wrong(path, f"the tool_use {id[:100]!r} has no tool_result in the message that follows")


def _wrong(param: str, reason: str) -> ApiError:
    return ApiError(400, f"Invalid value for {param!r}: {reason}", param=param, code="invalid_value")
