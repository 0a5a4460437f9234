"""What the server needs of an engine and of a tokenizer, and nothing more."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from attar.runtime.async_engine import AsyncEngine
from attar.runtime.results import Event
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.counts import Counts


@dataclass(frozen=True)
class Stats:
    """Where the engine stands.

    Attributes:
        running: requests that run.
        waiting: requests that wait.
        cache_usage: share of the key-value pool's blocks that requests hold, 0 to 1.
        blocks: of the pool, by who holds them: free, cached (finished texts; given up when room is
            needed), used (requests).
        prefix_queries: prompt tokens that were looked up in the prefix cache since the start.
        prefix_hits: of these, found.
        preemptions: since the start.
        speculation: None where nothing is drafted.
        free: texts that may begin to run besides those that run.
    """

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    blocks: Mapping[str, int] = field(default_factory=dict)
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    speculation: Counts | None = None
    free: int = 0


class Backend(Protocol):
    """An engine that several requests share; called from one event loop.

    Attributes:
        context: positions of the model; None: no limit.
        vocabulary: token ids are in [0, vocabulary).
        alive: False once the engine can run nothing any more.
        failure: what ended it where it should not have ended: a block that leaked, a bug; else None.
    """

    @property
    def context(self) -> int | None: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def alive(self) -> bool: ...
    @property
    def failure(self) -> Exception | None: ...

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
        """The events of a request's texts; ends after the last. It begins when it is first asked for one.

        Raises:
            DataError, SettingsError: (from the iterator) it can never run.
            BusyError: (from the iterator) too much is waiting already.
        """
        ...

    def cancel(self, id: str) -> None:
        """Give a request up soon; one that is unknown or finished is no error."""
        ...

    def stats(self) -> Stats:
        """Where it stands; cheap enough for every scrape and every request."""
        ...

    async def close(self) -> None:
        """End what runs and free what it holds."""
        ...


class Words(Protocol):
    """A tokenizer, called from threads; ``piece`` from the event loop too, so it waits for nobody.

    Attributes:
        longest: bytes of the longest token, or more.
    """

    @property
    def longest(self) -> int: ...

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Tokens of a text, with the model's begin token where ``special``."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        ...

    def piece(self, id: int) -> tuple[str, bytes]:
        """One token alone: its text, and its bytes."""
        ...

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of a conversation, ready for the answer.

        Raises:
            DataError: there is no chat template, or it refuses the messages.
        """
        ...


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
