"""Answers, as the published OpenAPI names them, and the small parts that both endpoints share."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from attar.runtime.results import FinishReason

Reason = Literal["stop", "length"]


class PromptDetails(BaseModel):
    """Prompt tokens that the prefix cache had."""

    cached_tokens: int


class UsageBody(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None


class CompletionChoice(BaseModel):
    """One text."""

    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: Reason | None
    stop_reason: str | int | None = None


class CompletionBody(BaseModel):
    """The answer of /v1/completions, and each of its chunks."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | None = None


class AnswerMessage(BaseModel):
    """What the model says."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None = None
    finish_reason: Reason | None
    stop_reason: str | int | None = None


class ChatBody(BaseModel):
    """The answer of /v1/chat/completions."""

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
    """The one model there is."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeBody(BaseModel):
    """The answer of /tokenize."""

    count: int
    max_model_len: int | None
    tokens: list[int]


class DetokenizeBody(BaseModel):
    """The answer of /detokenize."""

    prompt: str


class StateBody(BaseModel):
    """The answer of /health and /ready."""

    status: str
    reason: str | None = None


def head(id: str, kind: str, model: str, created: int) -> dict[str, Any]:
    """How an answer, or a chunk, begins; ``created``: seconds since 1970, the same in all chunks."""
    return {"id": id, "object": kind, "created": created, "model": model}


def reason(finished: FinishReason | None) -> Reason | None:
    """OpenAI's word: whatever cut the text short is ``length``."""
    return None if finished is None else "stop" if finished == "stop" else "length"


def why(finished: FinishReason | None, stop: str | int | None) -> str | int | None:
    """``stop_reason``, as in vLLM: what stopped the text, or attar's own word where OpenAI has none."""
    return finished if finished in ("deadline", "capacity") else stop


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """Token counts."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return counts | {"prompt_tokens_details": {"cached_tokens": cached}}
