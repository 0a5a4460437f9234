"""GET /attar/state: what the page shows of a running engine: load, blocks of the cache, states, speculation.

It is read without the engine's thread (``kv/block_map.py``), and at most once in ``FRESH_S`` seconds, however
many ask. The counts of speculation grow since the start; acceptance over time is the quotient of differences.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi import APIRouter
from pydantic import BaseModel

from attar.runtime.kv.block_map import BlockMap
from attar.serving.http.backend import Stats
from attar.serving.http.service import Service

FRESH_S = 0.25


class BlockMapBody(BaseModel):
    """See :class:`attar.runtime.kv.block_map.BlockMap`."""

    block_size: int
    states: dict[str, int]
    quantized: int
    cell_blocks: int
    cells: str


class StatesBody(BaseModel):
    """What sequences and snapshots of the prefix cache carry in layers without keys and values."""

    bytes: int
    snapshots: int
    reused: int


class SpeculationBody(BaseModel):
    """Since the start: drafts verified, tokens in them, those accepted, and those at each position."""

    proposer: str
    drafts: int
    drafted: int
    accepted: int
    accepted_at: list[int]


class EngineState(BaseModel):
    """The response of /attar/state.

    Attributes:
        chat: whether the chat template tells who wrote a message; else the page lets the model continue text.
        compare: name of the second model of ``--compare``.
        prefix_hits: of ``prefix_queries`` prompt tokens, since the start.
        states: None where no layer carries any.
    """

    model: str
    context: int | None
    chat: bool
    compare: str | None = None
    running: int
    waiting: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    kv_dtype: str
    blocks: BlockMapBody | None = None
    states: StatesBody | None = None
    speculation: SpeculationBody | None = None


class StateReader:
    """Reads the state of a service's engine, and keeps it for a moment.

    Args:
        clock: seconds.
        compare: name of the model to compare with.
    """

    def __init__(
        self, service: Service, clock: Callable[[], float] = time.monotonic, compare: str | None = None
    ) -> None:
        self._service, self._clock, self._compare = service, clock, compare
        self._read_at = float("-inf")
        self._state: EngineState | None = None

    def read(self) -> EngineState:
        """The state, ``FRESH_S`` seconds old at most."""
        now = self._clock()
        if self._state is None or now - self._read_at >= FRESH_S:
            self._state, self._read_at = engine_state(self._service, self._compare), now
        return self._state


def engine_state(service: Service, compare: str | None = None) -> EngineState:
    """The state now."""
    stats = service.backend.stats()
    return EngineState(
        model=service.model,
        context=service.backend.context,
        chat=service.tokenizer.tells_roles,
        compare=compare,
        running=stats.running,
        waiting=stats.waiting,
        preemptions=stats.preemptions,
        prefix_queries=stats.prefix_queries,
        prefix_hits=stats.prefix_hits,
        kv_dtype=str(service.facts.get("kv_dtype", "")),
        blocks=_blocks_body(service.backend.block_map()),
        states=_states_body(stats),
        speculation=_speculation_body(stats, str(service.facts.get("speculation", ""))),
    )


def add_state(router: APIRouter, service: Service, compare: str | None = None) -> None:
    """The path."""
    reader = StateReader(service, compare=compare)

    @router.get("/attar/state")
    async def state() -> EngineState:
        return reader.read()


def _blocks_body(blocks: BlockMap | None) -> BlockMapBody | None:
    return None if blocks is None else BlockMapBody(**vars(blocks))


def _states_body(stats: Stats) -> StatesBody | None:
    counts = {sample.name: int(sample.value) for sample in stats.samples}
    if "state_bytes" not in counts:
        return None
    names = {"bytes": "state_bytes", "snapshots": "state_snapshots", "reused": "state_snapshots_reused"}
    return StatesBody(**{field: counts[name] for field, name in names.items()})


def _speculation_body(stats: Stats, description: str) -> SpeculationBody | None:
    counts = stats.speculation
    if counts is None:
        return None
    return SpeculationBody(
        proposer=description.partition(",")[0],
        drafts=counts.drafts,
        drafted=counts.drafted,
        accepted=counts.accepted,
        accepted_at=counts.accepted_at,
    )
