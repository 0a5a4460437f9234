"""attar's own engine as the server's :class:`~attar.runtime.server.backend.Backend`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from attar.runtime.results import Event
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.server.backend import Stats
from attar.runtime.stream import Streams


class EngineBackend:
    """An engine that runs in a thread of its own.

    Args:
        streams: the engine; closed by ``close``.
    """

    def __init__(self, streams: Streams) -> None:
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
        scheduler = self._streams.engine.scheduler
        manager = scheduler.manager
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            cache_usage=manager.usage,
            prefix_queries=manager.counts.asked,
            prefix_hits=manager.counts.hit,
            preemptions=scheduler.preemptions,
        )

    async def close(self) -> None:
        self._open = False
        await self._streams.close()
