"""Errors put into a server's own calls, each tied to one request, which names it in a header.

    faults = ServerFaults(monkeypatch, llm.engine)       # before the engine's thread starts
    faults.attach(server)                                # its tokenizer, gate and metrics
    headers = faults.blame(Fault("encode", after=1))     # of the request that suffers

A request's context knows its fault: whatever runs for it, in a task or in a thread, raises where the fault
is due. SERVER_PLACES are the server's calls; the engine's are those of ``tests/runtime/faults.py``. An error
of the server's is raised once, an engine's always. Those in UNSEEN come behind the answer or count it: they
may cost no request anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any

import pytest

from attar.runtime import async_engine as stream
from attar.runtime.engine import Engine
from attar.serving.http import (
    access_log,
    chat_endpoint,
    endpoints,
    metrics,
    middleware,
    request_body,
    responses,
    service,
)
from attar.serving.http.backend import EngineBackend
from attar.serving.http.request_handler import EventQueue, RequestHandler
from tests.runtime.faults import MEMORY, RUNNER, TEXT, Fault, Faults

ENGINE_PLACES = (*TEXT, *RUNNER, *MEMORY, "prompt", "texts", "forget")
BEFORE = ("address", "body", "params", "template", "special", "encode", "decode", "lane", "gate", "entering")
START = ("watch", "submit", "stats", "compile", "inside", "listen")
ANSWER = ("saw", "piece", "scores", "written", "chunk", "put", "take", "news")
UNSEEN = ("cancel", "took", "dropped", "counted", "log")
SERVER_PLACES = (*BEFORE, *START, *ANSWER, *UNSEEN)
FAULT_HEADER = b"x-fault"

_current: ContextVar[Fault | None] = ContextVar("fault", default=None)


class ServerFaults:
    """The errors of one server.

    Args:
        monkeypatch: takes back what is changed in modules.
        engine: its calls are wrapped too.

    Attributes:
        raised: the number of each request that a server's call raised for, and the call.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
        self._monkeypatch = monkeypatch
        self._faults: list[Fault] = []
        self._named: dict[str, Fault] = {}  # faults of the engine by the request's name
        self.raised: dict[int, str] = {}
        self.engine = Faults(engine, monkeypatch)
        self.engine.choose = lambda name, params: self._named.get(name)
        if engine.grammars is not None:
            self._wrap(engine.grammars, "matcher", "compile")
        self._read_headers()
        self._wrap_modules()

    def blame(self, fault: Fault) -> tuple[int, dict[str, str]]:
        """The number of a request, and the header that it must have."""
        self._faults.append(fault)
        return len(self._faults) - 1, {FAULT_HEADER.decode(): str(len(self._faults) - 1)}

    def attach(self, server: Any) -> None:
        """Wrap the parts of a running server."""
        parts = server.config.app.state.service
        for method, index in (("encode", "encode"), ("decode", "decode"), ("piece", "piece")):
            self._wrap(parts.tokenizer, method, index)
        self._wrap(parts.tokenizer, "_rendered", "template")
        self._wrap(parts.tokenizer._escaper, "encode", "special")
        self._wrap(parts.admission, "admit", "gate")
        self._wrap(parts.admission, "preparing", "entering")
        self._wrap(parts.admission, "serving", "inside")
        self._wrap(parts.admission, "served", "took")
        self._wrap(parts.metrics, "of_prompt", "watch")
        self._wrap(parts.metrics, "refused", "counted")

    def hit(self, place: str, fault: Fault | None = None) -> None:
        """Raises where the request that this runs for is due an error here."""
        fault = fault or _current.get()
        if fault is None or fault.place != place:
            return
        fault.after -= 1
        if fault.after == -1:  # once: its error must be sent
            self.raised[next(number for number, one in enumerate(self._faults) if one is fault)] = place
            raise fault.error(place)

    def _wrap(self, owner: Any, method: str, place: str) -> None:
        plain = getattr(owner, method)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            self.hit(place)
            return plain(*arguments, **options)

        self._monkeypatch.setattr(owner, method, wrapped)

    def _read_headers(self) -> None:
        plain = access_log.AccessLogMiddleware.__call__

        async def told(one: Any, scope: Any, receive: Any, send: Any) -> None:
            number = dict(scope.get("headers", ())).get(FAULT_HEADER)
            _current.set(None if number is None else self._faults[int(number)])
            await plain(one, scope, receive, send)

        self._monkeypatch.setattr(access_log.AccessLogMiddleware, "__call__", told)

    def _wrap_modules(self) -> None:
        self._wrap(middleware, "client_address", "address")
        self._wrap(request_body, "parse", "body")
        self._wrap(endpoints, "completion_params", "params")
        self._wrap(chat_endpoint, "chat_params", "params")
        self._wrap(endpoints, "completion_logprobs", "scores")
        self._wrap(chat_endpoint, "chat_logprobs", "scores")
        self._wrap(responses, "dump_json", "written")
        self._wrap(responses, "_write_chunks", "chunk")
        self._wrap(RequestHandler, "_wait_for_disconnect", "listen")
        self._wrap(metrics.PromptMetrics, "observe", "saw")
        self._wrap(metrics.PromptMetrics, "close", "dropped")
        self._wrap(EventQueue, "put", "put")
        self._wrap(EventQueue, "get", "take")
        self._wrap(EngineBackend, "cancel", "cancel")
        self._wrap(EngineBackend, "stats", "stats")
        self._wrap_log()
        self._wrap_submit()
        self._wrap_lanes()
        self._wrap_news()

    def _wrap_log(self) -> None:
        class Json:
            dumps = staticmethod(access_log.json.dumps)

        self._monkeypatch.setattr(access_log, "json", Json)
        self._wrap(Json, "dumps", "log")
        Json.dumps = staticmethod(Json.dumps)  # type: ignore[method-assign]

    def _wrap_submit(self) -> None:
        plain = EngineBackend.submit

        def submit(backend: EngineBackend, *arguments: Any, id: str, **options: Any) -> Any:
            self.hit("submit")
            if (fault := _current.get()) is not None and fault.place in ENGINE_PLACES:
                self._named[id] = fault
            return plain(backend, *arguments, id=id, **options)

        self._monkeypatch.setattr(EngineBackend, "submit", submit)

    def _wrap_lanes(self) -> None:
        """Threads know whom they work for."""
        plain: Callable[..., Any] = service.run_in_thread

        async def run(pool: Any, act: Any, values: Any) -> Any:
            self.hit("lane")
            return await plain(pool, partial(copy_context().run, act), values)

        self._monkeypatch.setattr(service, "run_in_thread", run)

    def _wrap_news(self) -> None:
        """Queues from the engine's thread know whose they are."""
        faults = self

        class Queue(asyncio.Queue):  # type: ignore[type-arg]
            def __init__(self) -> None:
                super().__init__()
                self.fault = _current.get()

            def put_nowait(self, item: Any) -> None:
                faults.hit("news", self.fault or Fault(""))
                super().put_nowait(item)

        self._monkeypatch.setattr(stream.asyncio, "Queue", Queue)


@contextmanager
def faulty(monkeypatch: pytest.MonkeyPatch, serving: Callable[..., Any], **options: Any) -> Any:
    """A server of ``real.serving`` with its faults: its address, them, the server."""
    result: list[ServerFaults] = []
    with serving(before=lambda engine: result.append(ServerFaults(monkeypatch, engine)), **options) as actual:
        url, _, server = actual
        result[0].attach(server)
        yield url, result[0], server
