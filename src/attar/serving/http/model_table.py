"""The models of a server by name: some are always loaded, others when a request names them.

    use(name) → the service of a model, held until the response has been sent
                not loaded: one load for all requests that wait, in a separate thread; before the load the
                idle models that were used least recently are closed, until the budget has room

A model is idle while no request uses it or waits for it. Bytes are estimates from the models' headers
(``runtime/model_bytes.py``). Loads run one after the other, in the order of their first requests.

A request may say how long its caller keeps the model afterwards (Ollama's ``keep_alive``); without a word a
caller keeps it. An idle model that no caller keeps is closed: nobody closes what another one keeps.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from attar.checkpoint.units import bytes_text
from attar.errors import SettingsError
from attar.serving.http.backend import Backend, MetricSample, Stats
from attar.serving.http.embeddings.embedders import Embedder
from attar.serving.http.errors import ApiError
from attar.serving.http.lora_adapters import LoraTable
from attar.serving.http.middleware import LOGGER
from attar.serving.http.request_handler import unless_disconnected
from attar.serving.http.service import Service, run_in_daemon_thread
from attar.serving.http.tokenizer import ServerTokenizer

RETRY_S = 5  # after a load that failed, until the next one
_GRACE_S = 2.0  # for a load that runs while the server ends
_NAMED = 10  # names in an error message, at most
_KEEPERS = 256  # callers of a model whose times are known


@dataclass(frozen=True)
class ServedModel:
    """A model, its name for clients, and a description of its engine.

    Args:
        defaults: of sampling parameters that a request does not have; None: those of the first model.
        source: folder, file or hub id; empty: not known.
    """

    name: str
    backend: Backend
    tokenizer: ServerTokenizer
    facts: Mapping[str, Any] = field(default_factory=dict)
    embedder: Embedder | None = None
    defaults: Mapping[str, Any] | None = None
    source: str = ""


@dataclass(frozen=True)
class NamedModel:
    """A model that is loaded when a request names it.

    Args:
        bytes: that it takes in memory, estimated.
        load: opens the model; called in a separate thread, again after the model was closed.
        source: as of :class:`ServedModel`.
    """

    name: str
    bytes: int
    load: Callable[[], ServedModel]
    source: str = ""


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes of all models together.

    Args:
        total: None: no limit.
        kept: of the models that are always loaded.
    """

    total: int | None = None
    kept: int = 0

    def excess(self, loaded: int) -> int:
        """Bytes beyond the budget, with ``loaded`` bytes of models besides the kept ones."""
        return 0 if self.total is None else max(self.kept + loaded - self.total, 0)

    def __str__(self) -> str:
        return "no budget" if self.total is None else f"--model-memory {bytes_text(self.total)}"


@dataclass
class _Slot:
    """A named model's state.

    Attributes:
        users: requests that use it or wait for it.
        last_use: number of its latest use; the smallest one is closed first.
        retry_at: time from which a load is tried again.
        kept_until: time until which each caller keeps it, since its load.
        timer: closes it then.
    """

    model: NamedModel
    service: Service | None = None
    loading: asyncio.Task[None] | None = None
    users: int = 0
    last_use: int = 0
    loads: int = 0
    retry_at: float = float("-inf")
    kept_until: dict[str, float] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None

    def keep(self, caller: str, until: float) -> None:
        """A caller keeps the model until some time; of many callers only the last time is known."""
        self.kept_until[caller] = until
        if len(self.kept_until) > _KEEPERS:
            self.kept_until = {"": self.expires}

    @property
    def expires(self) -> float:
        """Time from which no caller keeps the model."""
        return max(self.kept_until.values(), default=math.inf)


class ModelTable:
    """The models of a server.

    Args:
        first: answers requests without a name.
        kept: others that are always loaded.
        named: the models that are loaded on request.
        serve: makes the service of a model.
        lora: adapters of the first model; None: it has none.
        clock: seconds.

    Raises:
        SettingsError: an adapter has the name of a model.
    """

    def __init__(
        self,
        first: Service,
        kept: Sequence[Service] = (),
        named: Sequence[NamedModel] = (),
        *,
        serve: Callable[[ServedModel], Service],
        budget: MemoryBudget | None = None,
        lora: LoraTable | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.first, self.budget = first, budget or MemoryBudget()
        self._kept = {service.model: service for service in (first, *kept)}
        self._slots = {model.name: _Slot(model) for model in named}
        self._serve, self._clock, self.lora = serve, clock, lora
        self._queue = first.admission.of(_LoadQueue())
        for adapter in [] if lora is None else lora.adapters:
            if adapter.name in self.names:
                raise SettingsError("lora", adapter.name, "a name that no model has")
        self._turn, self._closing = asyncio.Lock(), set[asyncio.Task[None]]()
        self._uses, self._failure_logged = 0, False

    @property
    def loaded(self) -> list[Service]:
        """The services of all loaded models, the first one first."""
        services = [slot.service for slot in self._slots.values() if slot.service is not None]
        return [*self._kept.values(), *services]

    @property
    def names(self) -> list[str]:
        """Of all models."""
        return [*self._kept, *self._slots]

    @property
    def sources(self) -> dict[str, str]:
        """Folder, file or hub id of each model and adapter's model; empty where it is not known."""
        always = {name: service.source for name, service in self._kept.items()}
        adapters = [] if self.lora is None else self.lora.adapters
        lent = {adapter.name: self.first.source for adapter in adapters}
        return always | {name: slot.model.source for name, slot in self._slots.items()} | lent

    def loaded_service(self, name: str) -> Service | None:
        """The service of a model or adapter, if it is loaded."""
        if name in self._slots:
            return self._slots[name].service
        return self._kept.get(name, self.first)

    @property
    def waiting_to_load(self) -> list[str]:
        """Names of the models that are not loaded."""
        return [name for name, slot in self._slots.items() if slot.service is None]

    @property
    def context(self) -> int | None:
        """Of the model with the longest one; None: not known, or without limit."""
        contexts = [service.backend.context for service in self.loaded]
        known = [context for context in contexts if context is not None]
        return None if self.waiting_to_load or len(known) < len(contexts) else max(known)

    @property
    def alive(self) -> bool:
        """Whether all engines run."""
        return all(service.backend.alive for service in self.loaded)

    @property
    def failure(self) -> Exception | None:
        """What stopped an engine; None while all run."""
        failures = (service.backend.failure for service in self.loaded)
        return next((failure for failure in failures if failure is not None), None)

    def failure_reason(self) -> str | None:
        """What stopped an engine, for clients; the log gets the traceback, once.

        Only the engine's own checks are quoted: messages of other errors may hold private data.
        """
        failure = self.failure
        if failure is None:
            return None
        if not self._failure_logged:
            self._failure_logged = True
            logging.getLogger(LOGGER).critical("the engine has stopped", exc_info=failure)
        return str(failure) if isinstance(failure, AssertionError) else type(failure).__name__

    def check_name(self, name: str | None) -> None:
        """Raise ApiError (404) for a name that no model has."""
        adapters = [] if self.lora is None else [adapter.name for adapter in self.lora.adapters]
        names = [*self.names, *adapters]
        if name is None or name in names:
            return
        listed = ", ".join(map(repr, names[:_NAMED])) + (", ..." if len(names) > _NAMED else "")
        message = f"The model {name[:200]!r} does not exist; this server has {listed}."
        raise ApiError(404, message, param="model", code="model_not_found")

    async def use(self, name: str | None, request: Request, keep_s: float = math.inf) -> Service:
        """The service of a model, which stays loaded until the request has been answered.

        Args:
            keep_s: seconds for which the caller keeps a named model afterwards.

        Raises:
            ApiError: 404, there is no such model; 503, it cannot be loaded now; 429, too many requests wait
                for models; 499, the client has disconnected.
        """
        self.check_name(name)
        if name is None or name in self._kept:
            return self.first if name is None else self._kept[name]
        leases: ExitStack = request.scope["state"]["leases"]
        if self.lora is not None and name in self.lora:
            return leases.enter_context(self.lora.used(name))
        slot = self._slots[name]
        leases.enter_context(self._used(slot))
        if slot.service is None:
            await self._wait(slot, request)
        caller = self.first.caller(request).name
        slot.keep(caller, math.inf)
        leases.callback(lambda: slot.keep(caller, self._clock() + keep_s))
        assert slot.service is not None, "a model that is used stays loaded"
        return slot.service

    def samples(self) -> list[MetricSample]:
        """Whether each named model is loaded, and how often it was."""
        rows = [(slot, {"model_name": name}) for name, slot in self._slots.items()]
        states = [
            MetricSample("model_loaded", "Whether it is loaded.", slot.service is not None, False, labels)
            for slot, labels in rows
        ]
        return [
            *states,
            *(
                MetricSample("model_loads", "Times that it was loaded.", slot.loads, labels=labels)
                for slot, labels in rows
            ),
        ]

    async def close(self) -> None:
        """End all engines. A load that runs is waited for, but not long."""
        loading = [slot.loading for slot in self._slots.values() if slot.loading is not None]
        if loading := [*loading, *self._closing]:
            await asyncio.wait(loading, timeout=_GRACE_S)
        if self.lora is not None:
            await self.lora.close()
        for service in self.loaded:
            await service.backend.close()

    def let_go(self, name: str, request: Request) -> None:
        """The caller keeps a named model no longer.

        Raises:
            ApiError: 404, there is no such model; 400, it is always loaded.
        """
        self.check_name(name)
        if name not in self._slots:
            message = f"the model {name!r} is always loaded; those that are loaded on request can be unloaded"
            raise ApiError(400, message, param="keep_alive", code="invalid_value")
        slot = self._slots[name]
        slot.keep(self.first.caller(request).name, self._clock())
        self._close_later(slot)

    def kept_s(self, name: str) -> float:
        """Seconds for which a caller keeps a loaded model; infinite without an end."""
        slot = self._slots.get(name)
        return math.inf if slot is None else max(slot.expires - self._clock(), 0.0)

    @contextmanager
    def _used(self, slot: _Slot) -> Iterator[None]:
        self._uses += 1
        slot.users, slot.last_use = slot.users + 1, self._uses
        try:
            yield
        finally:
            slot.users -= 1
            self._close_later(slot)

    def _close_later(self, slot: _Slot) -> None:
        """Close a model once it is idle and no caller keeps it."""
        if slot.timer is not None:
            slot.timer.cancel()
        if slot.service is not None and not slot.users and slot.expires < math.inf:
            delay = max(slot.expires - self._clock(), 0.0)
            slot.timer = asyncio.get_running_loop().call_later(delay, self._close_expired, slot)

    def _close_expired(self, slot: _Slot) -> None:
        task = asyncio.create_task(self._close_unkept(slot))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close_unkept(self, slot: _Slot) -> None:
        async with self._turn:  # a load of the same model would take its memory twice
            if slot.service is None or slot.users:
                return
            if slot.expires <= self._clock():
                await _close(slot)
            else:
                self._close_later(slot)

    async def _wait(self, slot: _Slot, request: Request) -> None:
        """Wait until a model is loaded, with all others who do."""
        caller = self.first.caller(request)
        self._queue.admit(1, caller)
        if self._clock() < slot.retry_at:
            raise self._load_failed(slot)
        if slot.loading is None:
            slot.loading = asyncio.create_task(self._load(slot))
            slot.loading.add_done_callback(lambda task: _end_load(slot, task))
        loading = slot.loading
        stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._queue.serving(lambda: _set(stopped), 1, caller):
            either = asyncio.wait((loading, stopped), return_when=asyncio.FIRST_COMPLETED)
            await unless_disconnected(either, request)
        if not loading.done() or loading.cancelled():
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_s=1)
        failure = loading.exception()
        if isinstance(failure, ApiError):
            raise ApiError(failure.status, failure.message, code=failure.code, retry_s=failure.retry_s)
        if failure is not None:
            raise failure

    async def _load(self, slot: _Slot) -> None:
        """Load a model once its turn has come.

        Raises:
            ApiError: 503, there is no room, or it cannot be loaded; the log has the reason.
        """
        async with self._turn:
            await self._make_room(slot)
            try:
                served = await run_in_daemon_thread(slot.model.load, "attar-loader")
            except Exception as error:
                slot.retry_at = self._clock() + RETRY_S
                logging.getLogger(LOGGER).error("the model %r cannot be loaded: %s", slot.model.name, error)
                raise self._load_failed(slot) from None
            slot.service, slot.loads, slot.kept_until = self._serve(served), slot.loads + 1, {}

    async def _make_room(self, slot: _Slot) -> None:
        """Close idle models until a model fits.

        Raises:
            ApiError: 503, too few are idle.
        """
        while excess := self.budget.excess(slot.model.bytes + self._loaded_bytes()):
            idle = [slot for slot in self._slots.values() if slot.service is not None and not slot.users]
            if sum(slot.model.bytes for slot in idle) < excess:
                size = bytes_text(slot.model.bytes)
                message = (
                    f"no room for the model {slot.model.name!r} ({size}) within {self.budget}: "
                    "the other models are in use"
                )
                raise ApiError(503, message, code="no_memory", retry_s=self.first.admission.retry_s())
            await _close(min(idle, key=lambda slot: slot.last_use))

    def _loaded_bytes(self) -> int:
        return sum(slot.model.bytes for slot in self._slots.values() if slot.service is not None)

    def _load_failed(self, slot: _Slot) -> ApiError:
        message = f"the model {slot.model.name!r} cannot be loaded; the server's log has the reason"
        return ApiError(503, message, code="model_not_loaded", retry_s=RETRY_S)


async def _close(slot: _Slot) -> None:
    """End a model's engine and free its memory."""
    service, slot.service = slot.service, None
    assert service is not None and not slot.users, "a model that is closed is idle"
    await service.backend.close()
    del service
    await asyncio.to_thread(gc.collect)  # modules and their hooks refer to each other


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _end_load(slot: _Slot, task: asyncio.Task[None]) -> None:
    slot.loading = None
    if not task.cancelled():
        task.exception()  # those who waited have it


class _LoadQueue:
    """The load of an engine for requests that wait for models: their admission counts them, and none runs."""

    alive = True

    def stats(self) -> Stats:
        return Stats()
