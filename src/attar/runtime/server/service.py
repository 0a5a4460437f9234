"""What the endpoints share: the server's parts, and the way from a checked body to a running flow."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from attar.errors import AttarError
from attar.runtime.results import Event
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.server.access_log import LOGGER, log_errors
from attar.runtime.server.admission_control import AdmissionControl
from attar.runtime.server.api_keys import ApiKey
from attar.runtime.server.backend import Backend, Words
from attar.runtime.server.errors import ApiError, api_error
from attar.runtime.server.metrics import Metrics
from attar.runtime.server.protocol import ChatMessage
from attar.runtime.server.request_handler import ClientDisconnectedError, RequestHandler
from attar.runtime.server.responses import ALIVE, DONE, EventStreamResponse, dump_json, sse_event
from attar.runtime.server.settings import ServerSettings

News = list[tuple[int, Event]]
Show = Callable[[int, Event], list[dict[str, Any]]]
"""The chunks that a choice's event becomes."""
_FEW = 32  # tokens whose log-probabilities the event loop writes itself


SMALL = 64 << 10  # bytes or characters; shorter work need not go to a lane of its own


class ThreadPools:
    """Three pools of threads."""

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(4, "attar-small")
        self._large = ThreadPoolExecutor(1, "attar-large")
        self._answers = ThreadPoolExecutor(2, "attar-answers")

    async def small(self, act: Callable[..., Any], *values: Any) -> Any:
        """Run what takes milliseconds."""
        return await _run(self._small, act, values)

    async def sized(self, size: int, act: Callable[..., Any], *values: Any) -> Any:
        """Run what takes time by its size, in characters or tokens."""
        return await _run(self._small if size <= SMALL else self._large, act, values)

    async def answer(self, act: Callable[..., Any], *values: Any) -> Any:
        """Run what makes an answer."""
        return await _run(self._answers, act, values)

    def close(self) -> None:
        """Threads end when their work is done; what has not begun is dropped."""
        for pool in (self._small, self._large, self._answers):
            pool.shutdown(wait=False, cancel_futures=True)


async def _run(pool: ThreadPoolExecutor, act: Callable[..., Any], values: tuple[Any, ...]) -> Any:
    return await asyncio.get_running_loop().run_in_executor(pool, partial(act, *values))


@dataclass
class Service:
    """One server's parts.

    Args:
        backend: the engine.
        words: the tokenizer.
        settings: the limits.
        model: the name that clients give.
        gate: who may come in.
        metrics: what is counted.
        created: seconds since 1970.
        facts: what runs the model.
        lanes: threads for what takes time.
    """

    backend: Backend
    words: Words
    settings: ServerSettings
    model: str
    gate: AdmissionControl
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    facts: dict[str, Any] = field(default_factory=dict)
    lanes: ThreadPools = field(default_factory=ThreadPools)
    _mourned: bool = field(default=False, init=False)

    def check_model(self, name: str | None) -> None:
        """Raises RefusedError (404) for a model that is not the one there is."""
        if name is not None and name != self.model:
            message = f"The model {name[:200]!r} does not exist; this server has {self.model!r}."
            raise ApiError(404, message, param="model", code="model_not_found")

    def caller(self, request: Request) -> ApiKey:
        """Who asks."""
        caller: ApiKey = request.scope["state"]["caller"]
        return caller

    def priority(self, asked: int | None, caller: ApiKey) -> int:
        """Of a request; smaller goes first.

        Raises:
            RefusedError: 400, the caller may not choose it.
        """
        if not asked:
            return caller.priority
        if not (self.settings.priority or caller.set_priority):
            message = "this server does not let clients choose a priority"
            raise ApiError(400, message, param="priority", code="priority_not_allowed")
        return asked

    def check_texts(self, prompts: int, n: int) -> int:
        """Texts of a request; raises RefusedError (400) for too many."""
        most = self.settings.max_texts
        if prompts * n > most:
            message = f"{prompts:,} prompts times n={n} are {prompts * n:,} texts; the limit is {most:,}"
            raise ApiError(400, message, param="n", code="too_many_texts")
        return prompts * n

    def refused(self, error: Exception) -> ApiError:
        """What a client is told of an error, which is counted; of a bug no detail."""
        if isinstance(error, ApiError):
            shown = error
        elif isinstance(error, AttarError):
            shown = api_error(error, self.gate.retry_s())
        else:
            shown = ApiError(500, "the server failed; its log has the reason")
        with log_errors("the metrics"):
            self.metrics.refused(shown.status)
        return shown

    async def tokens(self, prompt: str, special: bool = True) -> list[int]:
        """Token ids of a text, in a thread.

        Raises:
            RefusedError: 400, it is longer than the context.
        """
        self._check_length(len(prompt))
        return self.check_prompt(await self.lanes.sized(len(prompt), self.words.encode, prompt, special))

    async def chat_tokens(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of a conversation, in a thread.

        Raises:
            RefusedError: 400, it is longer than the context.
            DataError: the chat template refuses it.
        """
        plain = [message.plain() for message in messages]
        length = sum(len(message["content"]) for message in plain)
        self._check_length(length)
        size = length + sum(len(message.get("tool_calls", ())) << 10 for message in plain)
        return self.check_prompt(await self.lanes.sized(size, self.words.chat, plain))

    def _check_length(self, characters: int) -> None:
        """Raises RefusedError (400) for a text that is too long whatever its tokens are."""
        context = self.backend.context
        if context is not None and characters > context * self.words.longest:
            least = -(-characters // self.words.longest)
            message = (
                f"This model's context is {context:,} tokens, but the prompt has {characters:,} characters, "
                f"which are at least {least:,} tokens."
            )
            raise ApiError(400, message, param="prompt", code="context_length_exceeded")

    def why_stopped(self) -> str | None:
        """What ended the engine, for whoever asks; the log has it with its place, once.

        Only the engine's own checks are quoted: another error's message may hold what nobody should read.
        """
        failure = self.backend.failure
        if failure is None:
            return None
        if not self._mourned:
            self._mourned = True
            logging.getLogger(LOGGER).critical("the engine has stopped", exc_info=failure)
        return str(failure) if isinstance(failure, AssertionError) else type(failure).__name__

    def check_prompt(self, ids: list[int]) -> list[int]:
        """Raises RefusedError (400) for token ids that the model does not have, or more than it can read."""
        context = self.backend.context
        if context is not None and len(ids) >= context:
            message = f"This model's context is {context:,} tokens, but the prompt has {len(ids):,}."
            raise ApiError(400, message, param="prompt", code="context_length_exceeded")
        if not ids:
            raise ApiError(400, "the prompt has no tokens", param="prompt", code="invalid_value")
        if max(ids) >= self.backend.vocabulary:
            message = f"token {max(ids)} is not of the vocabulary of {self.backend.vocabulary:,}"
            raise ApiError(400, message, param="prompt", code="invalid_value")
        return ids

    def params(self, make: Callable[[Any], SamplingParams], body: Any) -> SamplingParams:
        """Parameters of a body.

        Raises:
            SettingsError: fields that do not go together, or tokens that the model does not have.
        """
        made = make(body)
        made.fit(self.backend.vocabulary)
        return made

    async def start(
        self,
        request: Request,
        prefix: str,
        params: SamplingParams,
        prompts: list[list[int]],
        *,
        priority: int | None,
        start: float,
    ) -> RequestHandler:
        """Hand prompts to the engine.

        Args:
            prefix: of the answer's name.
            priority: that it asks for.
            start: when the request came, on ``time.monotonic``.

        Raises:
            RefusedError: 400, its caller may not choose a priority.
        """
        caller = self.caller(request)
        chosen = self.priority(priority, caller)
        facts = request.scope.setdefault("state", {}).setdefault("facts", {})
        identity = f"{prefix}-{uuid4().hex}"
        facts["request"] = identity
        flow = RequestHandler(
            self.backend,
            self.gate,
            self.metrics,
            request.receive,
            id=identity,
            params=params,
            caller=caller,
            texts=len(prompts) * params.n,
            start=start,
            facts=facts,
        )
        try:
            for ids in prompts:
                flow.submit(ids, priority=chosen, deadline_s=self.settings.request_s or None)
        except BaseException:
            await flow.close()
            raise
        return flow

    async def whole(
        self, flow: RequestHandler, build: Callable[[list[list[Event]]], dict[str, Any]]
    ) -> Response:
        """The answer in one piece.

        Args:
            build: from the events of every choice to the body; runs in a thread.
        """
        try:
            events: list[list[Event]] = [[] for _ in range(flow.choices)]
            async for news in flow.events():
                for choice, event in news:
                    events[choice].append(event)
            content = await self.lanes.answer(_written, build, events)
            return Response(content, media_type="application/json")
        except ClientDisconnectedError:
            return Response(status_code=499)  # nobody reads it; the log does
        except AttarError as error:
            raise api_error(error, self.gate.retry_s()) from error
        finally:
            await flow.close()

    async def streamed(
        self, flow: RequestHandler, show: Show, end: Callable[[], list[dict[str, Any]]]
    ) -> Response:
        """The answer in chunks. What is refused before the first event has a status of its own.

        Args:
            show: from an event to chunks.
            end: the chunks behind the last event.
        """
        events = flow.events(self.settings.alive_s)
        try:
            first = await anext(events)
        except ClientDisconnectedError:
            await flow.close()
            return Response(status_code=499)
        except AttarError as error:
            await flow.close()
            raise api_error(error, self.gate.retry_s()) from error
        except BaseException:
            await flow.close()
            raise
        return EventStreamResponse(self._chunks(flow, first, events, show, end))

    async def _chunks(
        self,
        flow: RequestHandler,
        first: News,
        events: AsyncGenerator[News, None],
        show: Show,
        end: Callable[[], list[dict[str, Any]]],
    ) -> AsyncGenerator[bytes, None]:
        try:
            yield await self._shown(first, show)
            async for news in events:
                if part := await self._shown(news, show):
                    yield part
            for data in end():
                yield sse_event(data)
        except ClientDisconnectedError:
            return
        except Exception as error:
            if not isinstance(error, AttarError | ApiError):
                logging.getLogger(LOGGER).error("request %s failed", flow.id, exc_info=error)
            yield sse_event(self.refused(error).body)
        finally:
            await flow.close()
        yield DONE

    async def _shown(self, news: News, show: Show) -> bytes:
        """Chunks of some events; many at a time, as a slow reader has them, are made in a thread."""
        if sum(len(event.logprobs) for _, event in news) > _FEW:
            shown: bytes = await self.lanes.answer(_chunks_of, news, show)
            return shown
        return _chunks_of(news, show)


def _chunks_of(news: News, show: Show) -> bytes:
    return (
        b"".join(sse_event(data) for choice, event in news for data in show(choice, event)) if news else ALIVE
    )


def _written(build: Callable[[list[list[Event]]], dict[str, Any]], events: list[list[Event]]) -> bytes:
    return dump_json(build(events)).encode()
