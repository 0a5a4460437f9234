"""Embeddings and scores: by an encoder in a separate thread, or by the engine of a causal model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from attar.errors import DataError
from attar.runtime.encoder import Encoder
from attar.runtime.results import Event
from attar.runtime.sampling.params import SamplingParams
from attar.serving.http.backend import Backend, Stats

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class TextJob:
    """How the texts of a request run in an engine.

    Attributes:
        id: of the request; its texts have numbers.
        salt: the tenant.
    """

    id: str
    priority: int = 0
    deadline_s: float | None = None
    salt: str = ""


class Embedder(Protocol):
    """Makes embeddings of token ids.

    Attributes:
        longest: most tokens of a text; None: no limit.
        dimensions: of an embedding.
    """

    @property
    def longest(self) -> int | None: ...
    @property
    def dimensions(self) -> int: ...

    async def embed(self, rows: Sequence[Sequence[int]], job: TextJob) -> list[Vector]:
        """Of each row of token ids, in their order; not normalized."""
        ...


class EngineEmbedder:
    """The pooled states of a causal model: each text is a prompt of its engine.

    Args:
        pooling: mean or last.
        dimensions: the hidden size.
    """

    def __init__(self, backend: Backend, pooling: str, dimensions: int) -> None:
        self._backend, self._dimensions, self.pooling = backend, dimensions, pooling
        self._params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, pooling=pooling)

    @property
    def longest(self) -> int | None:
        context = self._backend.context
        return None if context is None else context - 1  # the engine adds a token

    @property
    def dimensions(self) -> int:
        return self._dimensions

    async def embed(self, rows: Sequence[Sequence[int]], job: TextJob) -> list[Vector]:
        events = await run_prompts(self._backend, rows, self._params, job)
        return [
            next(event.embedding for event in text_events if event.embedding is not None)
            for text_events in events
        ]


async def run_prompts(
    backend: Backend, rows: Sequence[Sequence[int]], params: SamplingParams, job: TextJob
) -> list[list[Event]]:
    """The events of each prompt, which run together; where one fails, or the caller is cancelled, all end.

    Raises:
        AttarError: the engine refuses a prompt, or fails.
    """

    async def run(number: int, row: Sequence[int]) -> list[Event]:
        options: dict[str, Any] = {"id": f"{job.id}-{number}", "priority": job.priority}
        options |= {"deadline_s": job.deadline_s, "salt": job.salt}
        events = [event async for event in backend.submit(row, params, **options)]
        last = events[-1]
        if last.finish_reason not in ("stop", "length"):
            raise last.failure or DataError(f"the text was not finished: {last.finish_reason}")
        return events

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(number, row)) for number, row in enumerate(rows)]
    return [task.result() for task in tasks]


class EncoderThread(Backend):
    """An encoder in a separate thread: jobs of all clients wait in one line.

    Also what the server knows as its engine: an encoder completes nothing.

    Args:
        encoder: not used by anything else.
    """

    hint = "use /v1/embeddings, /v1/score or /v1/rerank"

    def __init__(self, encoder: Encoder) -> None:
        super().__init__(encoder.context, encoder.vocabulary)
        self.encoder, self._jobs = encoder, 0
        self._pool = ThreadPoolExecutor(1, "attar-encoder")
        self.refusal = f"{encoder.name} is an encoder, and completes no text"

    @property
    def longest(self) -> int | None:
        return self.encoder.context

    @property
    def dimensions(self) -> int:
        return self.encoder.dimensions

    async def embed(self, rows: Sequence[Sequence[int]], job: TextJob) -> list[Vector]:
        if self.encoder.scores:
            raise DataError(
                "the model scores pairs of texts and embeds none", hint="use /v1/score or /v1/rerank"
            )
        return await self._run(self.encoder.embed, rows)

    async def score(self, rows: Sequence[Sequence[int]], segments: Sequence[Sequence[int]]) -> list[Vector]:
        """See :meth:`Encoder.score`."""
        return await self._run(self.encoder.score, rows, segments)

    def stats(self) -> Stats:
        """The jobs that run and wait."""
        return Stats(running=min(self._jobs, 1), waiting=max(self._jobs - 1, 0), free=1)

    async def close(self) -> None:
        """The running job ends, waiting jobs are dropped."""
        await super().close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Any, *arguments: Any) -> list[Vector]:
        self._jobs += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, partial(work, *arguments))
        finally:
            self._jobs -= 1
