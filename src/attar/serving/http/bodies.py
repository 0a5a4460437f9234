"""Bodies of responses, as OpenAI documents them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

from attar.serving.http.tool_calls.protocol import CallBody

FinishReasonBody = Literal["stop", "length", "tool_calls"]


class TokenSources(BaseModel):
    """``attar`` of a choice; one entry for each token."""

    token_ids: list[int]
    proposers: list[str]


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
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallBody] | None = None


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
    loaded: bool = True
    parent: str | None = None
    runtime: dict[str, Any] = {}


class ModelList(BaseModel):
    """The models of this server."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenPiece(BaseModel):
    """A token and its text, or its bytes where they are no text."""

    id: int
    piece: str | list[int]

    @classmethod
    def of(cls, id: int, text: str, raw: bytes) -> TokenPiece:
        """Of a token's text and bytes."""
        return cls(id=id, piece=list(raw) if "\ufffd" in text else text)


class TokenizeBody(BaseModel):
    """The response of /tokenize."""

    count: int
    max_model_len: int | None
    tokens: list[int] | list[TokenPiece]


class DetokenizeBody(BaseModel):
    """The response of /detokenize; ``content`` is llama.cpp's name of the same text."""

    prompt: str
    content: str


class StateBody(BaseModel):
    """The response of /health and /ready."""

    status: str
    reason: str | None = None


class VersionBody(BaseModel):
    """The response of /version."""

    version: str


def token_sources(tokens: Sequence[int], proposers: Sequence[str]) -> dict[str, Any]:
    """``attar`` of a choice: who proposed each token; empty where the request does not ask for the field.

        request        "attar": {"tokens": true}
        each choice    "attar": {"token_ids": [301, 17], "proposers": ["suffix", "target"]}

    A proposer is the name of what drafted the token (a draft model or head, ``suffix``, ``lookahead``, ...),
    and ``target`` where the model itself chose the token: without a draft, or against one. The names come
    from verification. In a stream the two lists belong to the tokens of the chunk, as those of ``logprobs``.
    """
    return {"attar": {"token_ids": list(tokens), "proposers": list(proposers)}} if proposers else {}
