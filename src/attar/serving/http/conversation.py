"""Messages of a conversation, and how a chat template is to render them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from attar.serving.http.body_model import StrictModel, field_error
from attar.serving.http.tool_calls.protocol import CallBody, CallFunction

RESERVED = frozenset(
    (
        *("messages", "conversation", "tools", "documents", "chat_template", "tokenize", "padding"),
        *("add_generation_prompt", "continue_final_message", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "self", "template"),
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
    )
)
"""Names that ``chat_template_kwargs`` may not have: arguments of the rendering, and special tokens."""


IGNORED_OF_PARTS = (
    *("cache_control", "annotations", "logprobs", "citations", "id", "index", "metadata"),
    *("provider_options", "providerOptions", "prompt_cache_breakpoint"),
)
"""Fields of clients and of other services in a part of a content, which change no answer here."""
IGNORED_OF_MESSAGES = (
    *("id", "cache_control", "metadata", "reasoning_details", "thinking_blocks", "provider_specific_fields"),
    *("provider_options", "providerOptions", "citations", "images", "status", "type"),
)
"""The same in a message."""
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


class ContentPart(StrictModel):
    """A part of a message's content: text, under the names that clients give it."""

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str = ""
    refusal: str = ""

    @model_validator(mode="before")
    @classmethod
    def _check_kind(cls, part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        if isinstance(part.get("type"), str) and part["type"] not in _TEXT_PARTS:
            reason = f"a part of type {part['type'][:40]!r} cannot be read: this model takes text alone"
            raise field_error("type", reason)
        return {key: value for key, value in part.items() if key not in IGNORED_OF_PARTS}


class ChatMessage(StrictModel):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[CallBody] | None = None
    # in answers, which clients send back
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: CallFunction | None = None  # of clients older than tools
    annotations: Any = None
    audio: None = None

    @model_validator(mode="before")
    @classmethod
    def _check_ignored(cls, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        kept = {key: value for key, value in message.items() if key not in IGNORED_OF_MESSAGES}
        if message.get("images"):
            raise field_error("images", "images cannot be read: this model takes text alone")
        return kept

    def plain(self) -> dict[str, Any]:
        """For a chat template: parts joined, role ``developer`` as ``system``. The reasoning before calls is
        ``thinking``, too: gpt-oss's name for it, and its template takes no text beside it."""
        parts = self.content if isinstance(self.content, list) else []
        text = "".join(part.text or part.refusal for part in parts)
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": text if isinstance(self.content, list) else self.content or "",
        }
        reasoning = self.reasoning_content or self.reasoning
        calls = list(self.tool_calls or ())
        calls += [CallBody(function=self.function_call)] if self.function_call else []
        extra = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": [call.plain() for call in calls] or None,
            "reasoning_content": reasoning,
            "thinking": reasoning if calls and not message["content"] else None,
        }
        return message | {key: value for key, value in extra.items() if value is not None}


def check_variables(variables: dict[str, Any]) -> None:
    """Raise an error for ``chat_template_kwargs`` that a client may not set."""
    for name in variables:
        if name in RESERVED or not name.isidentifier() or name.startswith("_"):
            raise field_error("chat_template_kwargs", f"{name[:100]!r} is no variable that a client may set")


def check_chat_options(body: Any) -> None:
    """Raise an error that names the field for options of the chat template that do not go together.

    Args:
        body: a request with messages.
    """
    check_variables(body.chat_template_kwargs or {})
    if body.continue_final_message and body.add_generation_prompt:
        message = "the last message goes on, so no other begins: not both of them"
        raise field_error("continue_final_message", message)
    last = body.messages[-1] if body.messages else None
    if body.continue_final_message and last is not None and not last.plain()["content"]:
        raise field_error("continue_final_message", "the last message has no text that could go on")
