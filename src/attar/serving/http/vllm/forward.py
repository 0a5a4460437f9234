"""/v1/* to vLLM's server: keys, bounds and shares are attar's, requests and answers pass through.

A body of JSON is changed in three fields at most: ``priority``, as the caller's key has it; ``cache_salt``,
so that callers share no cached prefixes; and, for a caller whose tokens are counted, ``include_usage`` of a
stream.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import h11
from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from attar.serving.http.access_log import log_errors
from attar.serving.http.api_keys import ApiKey
from attar.serving.http.backend import Backend, Stats
from attar.serving.http.errors import ApiError
from attar.serving.http.request_handler import unless_disconnected
from attar.serving.http.service import Service
from attar.serving.http.vllm.process import VllmServer
from attar.serving.http.vllm.upstream import UpstreamAnswer, send

SEQUENCES = 256  # that vLLM runs at a time, where the number is not given
TAIL = 1 << 13  # bytes at the end of an answer, in which its usage stands
COUNTS = re.compile(rb'(?<!\\)"(prompt|completion|input|output)_tokens": ?(\d+)')
OF_CONNECTION = (b"connection", b"keep-alive", b"transfer-encoding", b"server", b"date")
PASSED_ON = ("accept", "content-type", "anthropic-version", "anthropic-beta", "x-request-id", "traceparent")


class VllmBackend(Backend):
    """vLLM's server as attar's sees it: alive or not, with the requests that are on their way.

    Args:
        sequences: that it runs at a time.
    """

    refusal = "vLLM answers /v1 alone"
    hint = "/v1/chat/completions, /v1/completions, /v1/messages and what else vLLM has there"

    def __init__(self, server: VllmServer, context: int | None, vocabulary: int, sequences: int) -> None:
        super().__init__(context, vocabulary)
        self.server, self._sequences, self._completions = server, sequences, 0

    @property
    def failure(self) -> Exception | None:
        return self.server.failure

    def stats(self) -> Stats:
        running = min(self._completions, self._sequences)
        return Stats(running=running, waiting=self._completions - running, free=self._sequences - running)

    @contextmanager
    def counted(self, completions: int) -> Iterator[None]:
        """Completions are on their way."""
        self._completions += completions
        try:
            yield
        finally:
            self._completions -= completions


def make_forward(backend: VllmBackend) -> APIRouter:
    """The paths, which come before attar's own; vLLM's metrics are under /vllm/metrics."""
    router = APIRouter()

    @router.api_route("/v1/{path:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def forward(request: Request) -> Response:
        return await _forward(backend, request.app.state.service, request)

    @router.get("/vllm/metrics", include_in_schema=False)
    async def metrics(request: Request) -> Response:
        return _response(await _send(backend, request, "/metrics", b""), request)

    return router


async def _forward(backend: VllmBackend, service: Service, request: Request) -> Response:
    raw_path, query = (request.scope[name].decode("latin-1") for name in ("raw_path", "query_string"))
    target = f"{raw_path}?{query}" if query else raw_path
    if request.method != "POST":
        return _response(await _send(backend, request, target, b""), request)
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise ApiError(499, "the client has disconnected") from None
    caller, leases = service.caller(request), request.scope["state"]["leases"]
    raw, completions, hidden = changed_body(raw, service, caller)
    service.admission.admit(completions, caller)
    usage = UsageMeter(service, request, caller)
    leases.callback(usage.charge)
    leases.enter_context(backend.counted(completions))
    closing = ExitStack()
    leases.enter_context(service.admission.serving(closing.close, completions, caller))
    loop = asyncio.get_running_loop()
    end = loop.time() + (service.settings.request_s or math.inf)
    try:
        async with asyncio.timeout_at(None if end == math.inf else end):
            answer = await unless_disconnected(_send(backend, request, target, raw), request)
    except TimeoutError:
        raise ApiError(503, "the request takes longer than request_s allows", code="cancelled") from None
    closing.callback(answer.close)
    if end < math.inf:
        leases.callback(loop.call_at(end, answer.close).cancel)
    return _response(answer, request, usage, hidden)


async def _send(backend: VllmBackend, request: Request, target: str, raw: bytes) -> UpstreamAnswer:
    headers = [
        (name.encode(), value.encode("latin-1")) for name in PASSED_ON if (value := request.headers.get(name))
    ]
    try:
        return await send(backend.server.socket, request.method, target, headers, raw)
    except (OSError, h11.RemoteProtocolError):
        raise ApiError(503, "vLLM does not answer", code="engine_stopped", retry_s=1) from None


def _response(
    answer: UpstreamAnswer, request: Request, usage: UsageMeter | None = None, hidden: bool = False
) -> Response:
    leases: ExitStack = request.scope["state"]["leases"]
    leases.callback(answer.close)
    pieces = answer.body if usage is None else usage.watched(answer.body, hidden)
    response = StreamingResponse(pieces, answer.status)
    dropped = (*OF_CONNECTION, *((b"content-length",) if hidden else ()))
    response.raw_headers = [(name, value) for name, value in answer.headers if name not in dropped]
    return response


def changed_body(raw: bytes, service: Service, caller: ApiKey) -> tuple[bytes, int, bool]:
    """A request's body for vLLM, its completions, and whether a stream's usage is hidden from the client.

    Raises:
        ApiError: 400, it is no object, or asks for more than is allowed.
    """
    try:
        body = json.loads(raw) if raw.lstrip()[:1] == b"{" else None
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not valid JSON") from None
    if body is None:
        return raw, 1, False  # sound, and what else is no JSON
    prompt, n = body.get("prompt"), body.get("n")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    if prompts > service.settings.max_prompts:
        message = f"{prompts:,} prompts; the limit is {service.settings.max_prompts:,}"
        raise ApiError(400, message, param="prompt", code="too_many_prompts")
    completions = service.check_completions(prompts, n if isinstance(n, int) and n > 0 else 1)
    requested = body.get("priority")
    if priority := service.priority_of(requested if isinstance(requested, int) else None, caller):
        body["priority"] = priority
    if caller.salt:
        body["cache_salt"] = caller.salt
    options = body.get("stream_options")
    requested_usage = isinstance(options, dict) and bool(options.get("include_usage"))
    hidden = bool(
        caller.tokens_per_minute and body.get("stream") and not requested_usage and "input" not in body
    )
    if hidden:
        body["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
    return json.dumps(body).encode(), completions, hidden


class UsageMeter:
    """Reads the tokens of an answer as it passes, and charges them to the caller."""

    def __init__(self, service: Service, request: Request, caller: ApiKey) -> None:
        self._service, self._caller, self._began = service, caller, time.monotonic()
        self._fields: dict[str, Any] = request.scope["state"]["log_fields"]
        self._tail = b""

    async def watched(self, body: AsyncIterator[bytes], hidden: bool) -> AsyncIterator[bytes]:
        """The same pieces; without the event of a usage that is ``hidden``."""
        unfinished = b""
        async for piece in body:
            self._tail = (self._tail + piece)[-TAIL:]
            if not hidden:
                yield piece
                continue
            *events, unfinished = (unfinished + piece).split(b"\n\n")
            for event in events:
                if not (b'"choices":[]' in event and b'"usage":' in event):
                    yield event + b"\n\n"
        if unfinished:
            yield unfinished

    def charge(self) -> None:
        """When the answer has ended."""
        counts = {kind.decode(): int(number) for kind, number in COUNTS.findall(self._tail)}
        prompt = counts.get("prompt", counts.get("input", 0))
        completion = counts.get("completion", counts.get("output", 0))
        self._service.admission.served(time.monotonic() - self._began, prompt + completion, self._caller)
        self._fields |= {"prompt_tokens": prompt, "completion_tokens": completion}
        with log_errors("the metrics"):
            self._service.metrics.prompt_tokens.inc(prompt)
            self._service.metrics.generation_tokens.inc(completion)
