"""attar's own engine as the server's :class:`~attar.runtime.server.backend.Backend`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from attar.runtime.async_engine import AsyncEngine
from attar.runtime.results import Event
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.server.backend import Stats


class EngineBackend:
    """An engine that runs in a thread of its own.

    Args:
        streams: the engine; closed by ``close``.
    """

    def __init__(self, streams: AsyncEngine) -> None:
        self._streams, self._open = streams, True

    @property
    def context(self) -> int | None:
        return self._streams.engine.runner.context

    @property
    def vocabulary(self) -> int:
        return self._streams.engine.vocabulary

    @property
    def alive(self) -> bool:
        return self._open and self._streams.failure is None

    @property
    def failure(self) -> Exception | None:
        return self._streams.failure

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        id: str,
        priority: int = 0,
        deadline_s: float | None = None,
        salt: str = "",
    ) -> AsyncIterator[Event]:
        return self._streams.stream(
            prompt, params, id=id, priority=priority, deadline_s=deadline_s, salt=salt
        )

    def cancel(self, id: str) -> None:
        self._streams.cancel(id)

    def stats(self) -> Stats:
        """Read without a lock: each count is one number, and they may be a step apart."""
        scheduler, speculator = self._streams.engine.scheduler, self._streams.engine.speculator
        manager = scheduler.manager
        free, cached = manager.free, manager.cached
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free=max(scheduler.limits.sequences - len(scheduler.running), 0),
            cache_usage=1 - (free + cached) / manager.capacity,
            blocks={"free": free, "cached": cached, "used": manager.capacity - free - cached},
            prefix_queries=manager.stats.asked,
            prefix_hits=manager.stats.hit,
            preemptions=scheduler.preemptions,
            speculation=None if speculator is None else speculator.counts.copy(),
        )

    async def close(self) -> None:
        self._open = False
        await self._streams.close()
