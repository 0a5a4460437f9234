"""What the endpoints share: the server's parts, its thread pools, and the checks of a request."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from attar.errors import AttarError
from attar.runtime.sampling.params import SamplingParams
from attar.serving.http.access_log import log_errors
from attar.serving.http.admission_control import AdmissionControl
from attar.serving.http.answer import AnswerForm
from attar.serving.http.api_keys import ApiKey
from attar.serving.http.backend import Backend
from attar.serving.http.conversation import ChatMessage
from attar.serving.http.errors import ApiError, api_error
from attar.serving.http.metrics import Metrics
from attar.serving.http.settings import ServerSettings
from attar.serving.http.tokenizer import ChatOptions, ServerTokenizer
from attar.serving.http.volatile_lines import FirstLineWatch, move_volatile
from attar.serving.services.trace import RequestTracer

if TYPE_CHECKING:
    from attar.serving.http.embeddings.embedders import Embedder

T = TypeVar("T")
SMALL = 64 << 10  # bytes or characters; larger work runs in a separate pool


class ThreadPools:
    """Threads for work that would block the event loop.

    Small and large work have separate pools: a client with long prompts keeps the large one busy, and the
    others do not wait for it. Work that cannot be interrupted (a tokenizer's) is bounded in length before.
    """

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(4, "attar-small")
        self._large = ThreadPoolExecutor(1, "attar-large")
        self._responses = ThreadPoolExecutor(2, "attar-responses")

    async def run_small(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run work of milliseconds."""
        return await run_in_thread(self._small, function, arguments)

    async def run_sized(self, size: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run work that grows with its size, in characters or tokens."""
        return await run_in_thread(self._small if size <= SMALL else self._large, function, arguments)

    async def run_response(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run work that writes a response."""
        return await run_in_thread(self._responses, function, arguments)

    def submit_response(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """The same from any thread."""
        return self._responses.submit(function, *arguments)

    def close(self) -> None:
        """Running work ends, waiting work is dropped."""
        for pool in (self._small, self._large, self._responses):
            pool.shutdown(wait=False, cancel_futures=True)


async def run_in_thread(
    pool: ThreadPoolExecutor, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    """The result of a call in a thread of a pool."""
    return await asyncio.get_running_loop().run_in_executor(pool, partial(function, *arguments))


async def run_in_daemon_thread(function: Callable[[], T], name: str) -> T:
    """The result of a call in a separate thread, which does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def finish(value: T | None, error: Exception | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def work() -> None:
        try:
            outcome: tuple[T | None, Exception | None] = (function(), None)
        except Exception as error:
            outcome = (None, error)
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(finish, *outcome)

    Thread(target=work, name=name, daemon=True).start()
    return await result


@dataclass
class Service:
    """One model of a server; ``source`` is its folder, file or hub id, where that is known."""

    backend: Backend
    tokenizer: ServerTokenizer
    settings: ServerSettings
    model: str
    admission: AdmissionControl
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    facts: dict[str, Any] = field(default_factory=dict)
    answers: AnswerForm = field(default_factory=lambda: AnswerForm.of(""))
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of sampling parameters
    embedder: Embedder | None = None
    source: str = ""
    volatile_lines: tuple[str, ...] = ()  # how those lines of system prompts begin that come last
    first_lines: FirstLineWatch = field(default_factory=FirstLineWatch)
    threads: ThreadPools = field(default_factory=ThreadPools)
    tracer: RequestTracer = field(default_factory=RequestTracer)

    def caller(self, request: Request) -> ApiKey:
        """The caller of a request, set by ``check_key``."""
        caller: ApiKey = request.scope["state"]["caller"]
        return caller

    def check_completions(self, prompts: int, n: int) -> int:
        """Completions of a request; raises ApiError (400) for too many."""
        limit = self.settings.max_texts
        if prompts * n > limit:
            message = (
                f"{prompts:,} prompts times n={n} are {prompts * n:,} completions; the limit is {limit:,}"
            )
            raise ApiError(400, message, param="n", code="too_many_texts")
        return prompts * n

    def check_prompt(self, ids: list[int]) -> list[int]:
        """Raise ApiError (400) for token ids outside the vocabulary, none, or more than the context holds."""
        context = self.backend.context
        if context is not None and len(ids) >= context:
            message = f"This model's context is {context:,} tokens, but the prompt has {len(ids):,}."
            raise ApiError(400, message, param="prompt", code="context_length_exceeded")
        if not ids:
            raise ApiError(400, "the prompt has no tokens", param="prompt", code="invalid_value")
        if max(ids) >= self.backend.vocabulary:
            message = f"token {max(ids)} is outside the vocabulary of {self.backend.vocabulary:,}"
            raise ApiError(400, message, param="prompt", code="invalid_value")
        return ids

    def check_ids(self, ids: list[int], longest: int | None) -> list[int]:
        """Raise ApiError (400) for a text to embed that is too long or empty, or unknown token ids."""
        if longest is not None and len(ids) > longest:
            message = f"a text has {len(ids):,} tokens, and this model reads {longest:,}"
            raise ApiError(400, message, param="input", code="context_length_exceeded")
        if not ids:
            raise ApiError(400, "a text has no tokens", param="input", code="invalid_value")
        if max(ids) >= self.backend.vocabulary:
            message = f"token {max(ids)} is outside the vocabulary of {self.backend.vocabulary:,}"
            raise ApiError(400, message, param="input", code="invalid_value")
        return ids

    async def encode_text(self, text: str, keep: int | None, special: bool = True) -> list[int]:
        """Token ids of a text; only the last ``keep`` where that is given.

        Raises:
            ApiError: 400, all of it is wanted, and it exceeds the context whatever its tokens are.
        """
        if keep is None:
            self._check_length(len(text))
        ids: list[int] = await self.threads.run_sized(len(text), self.tokenizer.encode, text, special)
        return ids if keep is None else ids[-keep:]

    async def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Token ids of a pair of texts, and 1 for those of the second."""
        length = len(first) + len(second)
        self._check_length(length)
        pair: tuple[list[int], list[int]] = await self.threads.run_sized(
            length, self.tokenizer.encode_pair, first, second
        )
        return pair

    async def encode(self, prompt: str, special: bool = True, keep: int | None = None) -> list[int]:
        """Token ids of a text.

        Args:
            keep: only this number of last tokens; None: all.

        Raises:
            ApiError: 400, it is longer than the context.
        """
        return self.check_prompt(await self.encode_text(prompt, keep, special))

    def kept_tokens(self, truncate: int | None, params: SamplingParams) -> int | None:
        """Last tokens of a prompt that are kept; None: all.

        Args:
            truncate: ``truncate_prompt_tokens``; -1: as many as the context has beside the completion.
        """
        if truncate != -1:
            return truncate
        context = self.backend.context
        return None if context is None else max(context - (params.max_tokens or 1), 1)

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        options: ChatOptions | None = None,
        keep: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation.

        Args:
            keep: only this number of last tokens; None: all.

        Raises:
            ApiError: 400, it is longer than the context.
            DataError: the chat template refuses it.
        """
        plain, options = [message.plain() for message in messages], options or ChatOptions()
        plain = move_volatile(plain, self.volatile_lines, options.continued)
        self.first_lines.see(plain)
        length = sum(len(message["content"]) for message in plain)
        length += sum(len(json.dumps(tool, ensure_ascii=False)) for tool in options.tools)
        if keep is None:
            self._check_length(length)
        size = length + sum(len(message.get("tool_calls", ())) << 10 for message in plain)
        ids = await self.threads.run_sized(size, self.tokenizer.chat, plain, options)
        return self.check_prompt(ids if keep is None else ids[-keep:])

    def _check_length(self, characters: int) -> None:
        """Raise ApiError (400) for a text that exceeds the context whatever its tokens are."""
        context = self.backend.context
        if context is not None and characters > context * self.tokenizer.longest:
            least = -(-characters // self.tokenizer.longest)
            message = (
                f"This model's context is {context:,} tokens, but the prompt has {characters:,} characters, "
                f"which are at least {least:,} tokens."
            )
            raise ApiError(400, message, param="prompt", code="context_length_exceeded")

    def priority_of(self, requested: int | None, caller: ApiKey) -> int:
        """The priority of a request; smaller runs first.

        Raises:
            ApiError: 400, the caller may not choose one.
        """
        if not requested:
            return caller.priority
        if not (self.settings.priority or caller.set_priority):
            message = "this server does not let clients choose a priority"
            raise ApiError(400, message, param="priority", code="priority_not_allowed")
        return requested

    def error_for(self, error: Exception) -> ApiError:
        """What the client gets for an error, which is counted; no details of a bug."""
        if isinstance(error, ApiError):
            answer = error
        elif isinstance(error, AttarError):
            answer = api_error(error, self.admission.retry_s())
        else:
            answer = ApiError(500, "the server failed; its log has the reason")
        with log_errors("the metrics"):
            self.metrics.refused(answer.status)
        return answer
