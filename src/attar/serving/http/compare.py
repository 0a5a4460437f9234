"""``attar serve A --compare B``: two models in one server, and how far apart they are on a text.

Each answers requests under its own name. POST /attar/compare takes a context and tokens that follow it, runs
both models on them, and returns for each token t with the distributions p of A and q of B before it

    log p(t), log q(t), KL(p || q) = sum_v p(v) (log p(v) - log q(v))       nats, in float64

of the models' own distributions: before penalties, temperature and cuts. The context is served by the prefix
cache; the tokens are run like a prompt, among other requests. One comparison runs at a time, over so many
tokens that the logits of one model fit in LOGIT_BYTES: the faster model's wait for the slower one's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future
from threading import Lock
from typing import Annotated
from uuid import uuid4

import torch
from fastapi import APIRouter
from pydantic import BaseModel, Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from torch import Tensor

from attar.errors import AttarError
from attar.runtime.engine import PromptObserver
from attar.serving.http.backend import EngineBackend
from attar.serving.http.body_model import StrictModel
from attar.serving.http.conversation import ChatMessage
from attar.serving.http.errors import ApiError, api_error
from attar.serving.http.protocol import TokenId
from attar.serving.http.request_handler import unless_disconnected
from attar.serving.http.service import Service

LOGIT_BYTES = 256 << 20


class CompareRequest(StrictModel):
    """The body of POST /attar/compare: a conversation or a text, and the tokens that follow it."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    prompt: str | None = None
    token_ids: Annotated[list[TokenId], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_context(self) -> CompareRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages")
        return self


class ComparedToken(BaseModel):
    """A token: its log-probability in the first and in the second model, and KL(first || second) there."""

    logprob: float
    other_logprob: float
    kl: float


class CompareBody(BaseModel):
    """The response of /attar/compare. ``mean_kl``: nats a token."""

    models: tuple[str, str]
    mean_kl: float
    tokens: list[ComparedToken]


def add_compare(router: APIRouter, first: Service, second: Service) -> None:
    """The path, for two services of one server."""
    turn = asyncio.Lock()

    @router.post("/attar/compare", response_model=CompareBody)
    async def compare(body: CompareRequest, request: Request) -> Response:
        if not first.tokenizer.same_tokens(second.tokenizer):
            message = "the two models have different tokenizers, so their tokens cannot be compared"
            raise ApiError(400, message, code="different_tokenizers")
        caller, began = first.caller(request), time.monotonic()
        _check_count(first, len(body.token_ids))
        with first.admission.preparing(2, caller):
            context = await _context(first, body)
            prompt = second.check_prompt(first.check_prompt([*context, *body.token_ids]))

            async def in_turn() -> list[ComparedToken]:
                async with turn:
                    return await score(first, second, prompt, len(context), caller.salt)

            try:
                tokens = await unless_disconnected(in_turn(), request)
            except AttarError as error:
                raise api_error(error, first.admission.retry_s()) from error
            finally:
                first.admission.served(time.monotonic() - began, 2 * len(prompt), caller)
        mean = sum(token.kl for token in tokens) / len(tokens)
        answer = CompareBody(models=(first.model, second.model), mean_kl=mean, tokens=tokens)
        return JSONResponse(answer.model_dump())


async def score(
    first: Service, second: Service, prompt: list[int], start: int, salt: str
) -> list[ComparedToken]:
    """Both models on the tokens [start, len(prompt)) of a prompt.

    Raises:
        ApiError: a model failed.
        AttarError: an engine refuses the prompt.
    """
    pairs = LogitPairs(first, prompt, min(first.backend.vocabulary, second.backend.vocabulary))
    async with asyncio.TaskGroup() as tasks:
        for side, service in enumerate((first, second)):
            tasks.create_task(_run(service, prompt, start - 1, pairs.observer(side), salt))
    return [await asyncio.wrap_future(pairs.results[index]) for index in range(start, len(prompt))]


async def _run(service: Service, prompt: list[int], start: int, observe: PromptObserver, salt: str) -> None:
    backend = service.backend
    assert isinstance(backend, EngineBackend), "a comparison needs engines in this process"
    id, seconds = f"score-{uuid4().hex}", service.settings.request_s or None
    async for event in backend.score(prompt, start, observe, id=id, salt=salt, deadline_s=seconds):
        if event.finish_reason == "deadline":
            raise ApiError(503, "the comparison takes longer than request_s allows", code="cancelled")
        if event.finish_reason in ("error", "cancelled", "capacity"):
            raise ApiError(500, f"{service.model} failed on the comparison; the server's log has the reason")


class LogitPairs:
    """Joins the logits of two models, which come from two threads; a pair is compared in a third.

    Args:
        vocabulary: tokens that both models have.

    Attributes:
        results: by index of the token in the prompt.
    """

    def __init__(self, service: Service, prompt: Sequence[int], vocabulary: int) -> None:
        self._threads, self._prompt, self._vocabulary = service.threads, prompt, vocabulary
        self._lock = Lock()
        self._waiting: dict[int, Tensor] = {}  # logits of the model that is ahead
        self.results: dict[int, Future[ComparedToken]] = {}

    def observer(self, side: int) -> PromptObserver:
        """Receives the logits of a model: 0 the first, 1 the second."""

        def observe(index: int, logits: Tensor) -> None:
            token = index + 1
            side_logits = logits[: self._vocabulary].to("cpu", copy=True)
            with self._lock:
                other = self._waiting.pop(token, None)
                if other is None:
                    self._waiting[token] = side_logits
                    return
                pair = (side_logits, other) if side == 0 else (other, side_logits)
                self.results[token] = self._threads.submit_response(
                    compare_logits, *pair, self._prompt[token]
                )

        return observe


def compare_logits(first: Tensor, second: Tensor, token: int) -> ComparedToken:
    """Of two rows of logits (V,) at a token; not modified. Computed in float64."""
    log_p, log_q = first.double().log_softmax(-1), second.double().log_softmax(-1)
    kl = torch.where(log_p.exp() > 0, log_p.exp() * (log_p - log_q), 0.0).sum()
    return ComparedToken(logprob=_finite(log_p[token]), other_logprob=_finite(log_q[token]), kl=_finite(kl))


def _finite(value: Tensor) -> float:
    """JSON has no infinity: a probability of 0 is -9999, as at OpenAI."""
    return max(-9999.0, min(float(value), 9999.0))


def _check_count(service: Service, count: int) -> None:
    limit = LOGIT_BYTES // (4 * service.backend.vocabulary)
    if count > limit:
        message = f"{count:,} tokens; {limit:,} can be compared at a time"
        raise ApiError(400, message, param="token_ids", code="too_many_values")


async def _context(service: Service, body: CompareRequest) -> list[int]:
    if body.messages is not None:
        return await service.encode_chat(body.messages)
    return await service.encode(body.prompt or "")
