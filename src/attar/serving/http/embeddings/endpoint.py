"""POST /v1/embeddings, /v1/score and /v1/rerank."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from attar.errors import AttarError
from attar.runtime.sampling.params import SamplingParams
from attar.serving.http.embeddings.embedders import EncoderThread, TextJob, Vector, run_prompts
from attar.serving.http.embeddings.protocol import MAX_TEXTS, EmbeddingRequest, RerankRequest, ScoreRequest
from attar.serving.http.errors import ApiError
from attar.serving.http.request_handler import disconnect
from attar.serving.http.responses import dump_json
from attar.serving.http.service import Service

SLICE = 16  # texts of a request that run at the same time
_SCORED = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)


@dataclass
class TextWork:
    """The texts of one request while they are embedded.

    Attributes:
        keep: last tokens of a text that are kept; None: all.
        tokens: that have been read.
    """

    service: Service
    job: TextJob
    keep: int | None
    tokens: int = 0

    async def encode(self, text: str | list[int]) -> list[int]:
        """Token ids of a text, which must fit."""
        if isinstance(text, str):
            ids = await self.service.encode_text(text, self.keep)
        else:
            ids = text if self.keep is None else text[-self.keep :]
        return self.service.check_ids(ids, self.longest)

    async def embed(self, texts: Sequence[str | list[int]]) -> list[Vector]:
        """Embeddings of length 1, a slice at a time."""
        embedder = self.service.embedder
        if embedder is None:
            message = "this server makes no embeddings: start it with --pooling mean or last"
            raise ApiError(400, message, code="embeddings_off")
        vectors: list[Vector] = []
        for start in range(0, len(texts), SLICE):
            rows = [await self.encode(text) for text in texts[start : start + SLICE]]
            job = TextJob(f"{self.job.id}-{start}", self.job.priority, self.job.deadline_s, self.job.salt)
            vectors += map(normalized, await embedder.embed(rows, job))
            self.tokens += sum(map(len, rows))
        return vectors

    async def score(self, pairs: Sequence[tuple[str, str]]) -> tuple[str, list[float]]:
        """The method, and a score of each pair."""
        backend = self.service.backend
        if isinstance(backend, EncoderThread) and backend.encoder.scores:
            return "classifier", await self._classified(backend, pairs)
        if self.service.embedder is not None:
            return "cosine", await self._cosines(pairs)
        return "log_probability", await self._log_probabilities(pairs)

    @property
    def longest(self) -> int | None:
        embedder, context = self.service.embedder, self.service.backend.context
        if embedder is not None:
            return embedder.longest
        return None if context is None else context - 1

    async def _classified(self, encoder: EncoderThread, pairs: Sequence[tuple[str, str]]) -> list[float]:
        scores: list[float] = []
        for start in range(0, len(pairs), SLICE):
            rows = [await self.service.encode_pair(*pair) for pair in pairs[start : start + SLICE]]
            ids = [self.service.check_ids(list(tokens), self.longest) for tokens, _ in rows]
            scores += [float(score[0]) for score in await encoder.score(ids, [types for _, types in rows])]
            self.tokens += sum(map(len, ids))
        return scores

    async def _cosines(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Each text is embedded once."""
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        vectors = dict(zip(texts, await self.embed(texts), strict=True))
        return [float(vectors[first] @ vectors[second]) for first, second in pairs]

    async def _log_probabilities(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """ln p of the second text's tokens after the first text."""
        scores: list[float] = []
        for start in range(0, len(pairs), SLICE):
            rows, counts = [], []
            for first, second in pairs[start : start + SLICE]:
                before = await self.service.encode_text(first, None)
                after = await self.service.encode_text(second, None, special=False)
                rows.append(self.service.check_ids([*before, *after], self.longest))
                counts.append(len(after))
            job = TextJob(f"{self.job.id}-{start}", self.job.priority, self.job.deadline_s, self.job.salt)
            for events, count in zip(
                await run_prompts(self.service.backend, rows, _SCORED, job), counts, strict=True
            ):
                listed = next(event.prompt_logprobs for event in events if event.prompt_logprobs is not None)
                scored = [score for score in listed[len(listed) - count :] if score is not None]
                scores.append(sum(score.logprob for score in scored))
            self.tokens += sum(map(len, rows))
        return scores


async def embeddings(service: Service, body: EmbeddingRequest, request: Request) -> Response:
    """Embed texts."""
    texts = body.texts
    _check_count("input", len(texts))
    async with working(service, body, request, len(texts)) as work:
        vectors = await work.embed(texts)
    size = len(vectors[0])
    if body.dimensions is not None:
        if body.dimensions > size:
            message = f"the model's embeddings have {size:,} dimensions"
            raise ApiError(400, message, param="dimensions", code="invalid_value")
        vectors = [normalized(vector[: body.dimensions]) for vector in vectors]
    content = await service.threads.run_response(
        _write, service.model, vectors, body.encoding_format == "base64", work.tokens
    )
    return Response(content, media_type="application/json")


async def score(service: Service, body: ScoreRequest, request: Request) -> Response:
    """Score pairs of texts."""
    pairs = body.pairs()
    if not pairs:
        raise ApiError(400, "text_1 is one text, or as many as text_2", param="text_1", code="invalid_value")
    async with working(service, body, request, len(pairs)) as work:
        method, scores = await work.score(pairs)
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
    answer = {"id": work.job.id, "object": "list", "created": int(time.time()), "model": service.model}
    return _json(answer | {"method": method, "data": data, "usage": _usage(work.tokens)})


async def rerank(service: Service, body: RerankRequest, request: Request) -> Response:
    """Order documents by a query: by embeddings or a classifier of (query, document), or by log p of the
    query after the document, where the model is a causal one."""
    texts = body.texts
    causal = service.embedder is None and not isinstance(service.backend, EncoderThread)
    pairs = [(text, body.query) if causal else (body.query, text) for text in texts]
    async with working(service, body, request, len(pairs)) as work:
        method, scores = await work.score(pairs)
    best = sorted(range(len(texts)), key=lambda index: (-scores[index], index))
    best = best if body.top_n is None else best[: body.top_n]
    shown = body.return_documents is not False
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": texts[index]}} if shown else {})
        for index in best
    ]
    answer = {"id": work.job.id, "model": service.model, "method": method}
    return _json(answer | {"results": results, "usage": _usage(work.tokens)})


def normalized(vector: Vector) -> Vector:
    """Of length 1; a vector of zeros stays."""
    length = float(np.linalg.norm(vector))
    return vector if length == 0 else (vector / length).astype(np.float32)


@asynccontextmanager
async def working(service: Service, body: Any, request: Request, texts: int) -> AsyncIterator[TextWork]:
    """Admit a request of some texts; it ends when its client leaves, or the server shuts down."""
    caller, begun = service.caller(request), time.monotonic()
    keep = body.truncate_prompt_tokens
    if keep == 0:
        raise ApiError(
            400, "it is a number from 1, or -1", param="truncate_prompt_tokens", code="invalid_value"
        )
    task = asyncio.current_task()
    assert task is not None
    log_fields = request.scope.setdefault("state", {}).setdefault("log_fields", {})
    id = log_fields["request"] = f"embd-{uuid4().hex}"
    priority = service.priority_of(body.priority, caller)
    work = TextWork(service, TextJob(id, priority, service.settings.request_s or None, caller.salt), keep)
    if keep == -1:
        work.keep = work.longest
    count, reason = min(texts, SLICE), ""

    def end(why: str) -> None:
        nonlocal reason
        reason = why
        task.cancel()

    async def watch() -> None:
        await disconnect(request.receive)
        end("left")

    with service.admission.preparing(count, caller):
        pass
    watcher = asyncio.create_task(watch())
    span = service.tracer.begin("embeddings", service.model, id=id, start=begun, headers=request.headers)
    error = "error"
    try:
        with service.admission.serving(lambda: end("shutdown"), count, caller):
            yield work
        error = ""
    except asyncio.CancelledError:
        error = "cancelled"
        if not reason:
            raise
        task.uncancel()
        if reason == "left":
            raise ApiError(499, "the client has disconnected") from None
        raise ApiError(503, "the server is shutting down", code="shutting_down", retry_s=1) from None
    except BaseExceptionGroup as group:
        raise _first(group) from group
    finally:
        watcher.cancel()
        span.end(error, {"gen_ai.usage.input_tokens": work.tokens})
        log_fields["prompt_tokens"] = work.tokens
        service.metrics.prompt_tokens.inc(work.tokens)
        service.admission.served(time.monotonic() - begun, work.tokens, caller)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error of the first task that failed; the others were cancelled."""
    errors: list[BaseException] = list(group.exceptions)
    return next((error for error in errors if isinstance(error, AttarError)), errors[0])


def _check_count(param: str, count: int) -> None:
    if count > MAX_TEXTS:
        message = f"{count:,} texts in one request; the limit is {MAX_TEXTS:,}"
        raise ApiError(400, message, param=param, code="too_many_texts")


def _write(model: str, vectors: Sequence[Vector], packed: bool, tokens: int) -> bytes:
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(vector.astype("<f4").tobytes()).decode()
            if packed
            else vector.tolist(),
        }
        for index, vector in enumerate(vectors)
    ]
    answer = {"object": "list", "data": data, "model": model, "usage": _usage(tokens)}
    return dump_json(answer).encode()


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _json(data: dict[str, Any]) -> Response:
    return Response(dump_json(data).encode(), media_type="application/json")
