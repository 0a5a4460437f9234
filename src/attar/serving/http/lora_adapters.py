"""LoRA adapters of a server's first model, by the names that requests give.

    --lora NAME=PATH                   at the start
    POST /v1/load_lora_adapter         {"lora_name", "lora_path"}: only with ``--lora-folder``, and below it
    POST /v1/unload_lora_adapter       {"lora_name"}

The paths and fields are vLLM's. A name stands for the same weights for every caller, so of several keys only
keys with ``adapters: true`` may load and unload. Each load has a separate key in the engine: a name may be
loaded again while requests still run with what it was. Prefixes and suffix trees are shared only by requests
of one tenant with adapters of the same content.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from attar.errors import AttarError
from attar.models.loading.adapter_files import FILES
from attar.serving.http.api_keys import ApiKey
from attar.serving.http.backend import EngineBackend
from attar.serving.http.body_model import StrictModel
from attar.serving.http.embeddings.embedders import EngineEmbedder
from attar.serving.http.errors import ApiError
from attar.serving.http.middleware import LOGGER
from attar.serving.http.service import Service, run_in_daemon_thread
from attar.serving.http.settings import LoraSettings

_POLL_S = 0.05  # until the requests of an adapter that was unloaded have ended


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter in the engine.

    Attributes:
        key: of requests with it.
        digest: of its content.
    """

    name: str
    path: str
    key: str
    digest: str


class AdapterBackend(EngineBackend):
    """The engine of a model, for requests with an adapter."""

    def __init__(self, base: EngineBackend, adapter: LoadedAdapter) -> None:
        super().__init__(base._streams, base._samples)
        self._base, self._adapter = base, adapter

    @property
    def alive(self) -> bool:
        return self._base.alive

    def _sharing(self, salt: str) -> dict[str, Any]:
        return {"salt": f"{salt}\0lora {self._adapter.digest}", "adapter": self._adapter.key}

    async def close(self) -> None:
        """The model closes its engine."""


@dataclass
class _Entry:
    """An adapter that requests may name; ``users`` are its requests."""

    adapter: LoadedAdapter
    service: Service
    users: int = 0


class LoraTable:
    """The adapters of a model by name.

    Args:
        base: the model's service; its backend is an :class:`EngineBackend`.
        loaded: adapters that the engine has already.
    """

    def __init__(self, base: Service, settings: LoraSettings, loaded: Sequence[LoadedAdapter] = ()) -> None:
        self.base, self.settings = base, settings
        self._entries: dict[str, _Entry] = {}
        self._engine_has = len(loaded)  # adapters, the ones that are being unloaded too
        self._numbers = itertools.count(len(loaded))
        self._turn, self._unloads = asyncio.Lock(), set[asyncio.Task[None]]()
        for adapter in loaded:
            self._enter(adapter)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def adapters(self) -> list[LoadedAdapter]:
        """Those that requests may name."""
        return [entry.adapter for entry in self._entries.values()]

    @contextmanager
    def used(self, name: str) -> Iterator[Service]:
        """The service of an adapter, which stays in the engine meanwhile."""
        entry = self._entries[name]
        entry.users += 1
        try:
            yield entry.service
        finally:
            entry.users -= 1

    async def load(self, name: str, path: str, models: Sequence[str]) -> None:
        """Load an adapter from a folder below ``--lora-folder``.

        Args:
            models: their names, which an adapter cannot have.

        Raises:
            ApiError: 400, the name or the path is not allowed, or the adapter does not fit; 503, too many.
        """
        from attar.runtime.runner.lora import read_lora  # takes transformers with it, as the modules do

        folder = self._allowed(path)
        async with self._turn:
            if name in models or name in self._entries:
                raise _refused("lora_name", f"there is a model or an adapter {name!r} already")
            if self._engine_has >= self.settings.max_loras:
                message = f"{self._engine_has} adapters are loaded, max_loras allows no more"
                raise ApiError(503, message, code="too_many_adapters", retry_s=5)
            try:
                adapter = await run_in_daemon_thread(lambda: read_lora(folder), "attar-lora")
                loaded = LoadedAdapter(name, path, f"{name} {next(self._numbers)}", adapter.digest)
                prepared = await run_in_daemon_thread(lambda: self._backend.prepare(adapter), "attar-lora")
                await self._backend.add_adapter(loaded.key, prepared)
            except AttarError as error:
                logging.getLogger(LOGGER).error("the adapter %r cannot be loaded: %s", name, error)
                raise _refused("lora_path", error.message.replace(str(folder), path)) from error
            self._engine_has += 1
            self._enter(loaded)

    def unload(self, name: str) -> None:
        """No request may name an adapter any more; it leaves the engine when its last request has ended.

        Raises:
            ApiError: 404, there is none.
        """
        entry = self._entries.pop(name, None)
        if entry is None:
            message = f"there is no adapter {name[:200]!r}"
            raise ApiError(404, message, param="lora_name", code="adapter_not_found")
        task = asyncio.create_task(self._remove(entry))
        self._unloads.add(task)
        task.add_done_callback(self._unloads.discard)

    async def close(self) -> None:
        """Unloads that wait end; the engine is closed after this."""
        for task in self._unloads:
            task.cancel()
        await asyncio.gather(*self._unloads, return_exceptions=True)

    @property
    def _backend(self) -> EngineBackend:
        backend = self.base.backend
        assert isinstance(backend, EngineBackend), "adapters need an engine in this process"
        return backend

    def _enter(self, adapter: LoadedAdapter) -> None:
        backend, embedder = AdapterBackend(self._backend, adapter), self.base.embedder
        if embedder is not None:
            assert isinstance(embedder, EngineEmbedder), "the model is a causal one"
            embedder = EngineEmbedder(backend, embedder.pooling, embedder.dimensions)
        service = replace(self.base, model=adapter.name, backend=backend, embedder=embedder)
        self._entries[adapter.name] = _Entry(adapter, service)

    async def _remove(self, entry: _Entry) -> None:
        while entry.users or not await self._backend.remove_adapter(entry.adapter.key):
            await asyncio.sleep(_POLL_S)
        self._engine_has -= 1

    def _allowed(self, path: str) -> Path:
        """The folder of a path, which is below ``--lora-folder`` with its files; links are followed."""
        root = Path(self.settings.lora_folder).resolve()
        try:
            folder = (root / path).resolve()
        except (OSError, ValueError, RuntimeError):
            folder = root
        files = [folder / name for name in FILES]
        if root not in folder.parents or not all(
            root in Path(os.path.realpath(file)).parents for file in files
        ):
            raise _refused("lora_path", "the path is not below the server's --lora-folder")
        return folder


class LoadAdapterRequest(StrictModel):
    """The body of POST /v1/load_lora_adapter."""

    lora_name: str = Field(min_length=1, max_length=200)
    lora_path: str = Field(min_length=1, max_length=4096)


class UnloadAdapterRequest(StrictModel):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: str = Field(min_length=1, max_length=200)


def add_lora(router: APIRouter, table: LoraTable, names: Sequence[str]) -> None:
    """The two paths; ``names`` are those of models."""

    @router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    async def load_lora_adapter(body: LoadAdapterRequest, request: Request) -> Response:
        with table.base.admission.preparing(1, _permitted(table.base.caller(request))):
            await table.load(body.lora_name, body.lora_path, names)
        return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} added successfully.")

    @router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload_lora_adapter(body: UnloadAdapterRequest, request: Request) -> Response:
        _permitted(table.base.caller(request))
        table.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} removed successfully.")


def _permitted(caller: ApiKey) -> ApiKey:
    """The caller, if it may load and unload.

    Raises:
        ApiError: 403, it may not.
    """
    if caller.key and not caller.adapters:
        message = (
            f"the key {caller.name!r} may not load or unload adapters (adapters: true in the keys' file)"
        )
        raise ApiError(403, message, code="adapters_not_allowed")
    return caller


def first_adapters(settings: LoraSettings, runner: Any) -> list[LoadedAdapter]:
    """Load the adapters of ``--lora`` before the engine runs.

    Raises:
        AttarError: as :func:`attar.runtime.runner.lora.read_lora`.
    """
    if not settings.lora:
        return []
    from attar.runtime.runner.lora import read_lora  # as above

    adapters = []
    for number, (name, path) in enumerate(settings.paths.items()):
        adapter = read_lora(Path(path))
        loaded = LoadedAdapter(name, path, f"{name} {number}", adapter.digest)
        runner.lora.add(loaded.key, runner.lora.prepare(adapter))
        adapters.append(loaded)
    return adapters


def _refused(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
