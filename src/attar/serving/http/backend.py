"""The server's interface to an engine, and its implementation with attar's engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attar.errors import DataError
from attar.runtime.async_engine import AsyncEngine
from attar.runtime.engine import PromptObserver
from attar.runtime.kv.block_map import BlockMap, block_map
from attar.runtime.results import Event
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.speculative_pass import SpeculationCounts

if TYPE_CHECKING:
    from attar.runtime.runner.lora import LoraAdapter


@dataclass(frozen=True)
class MetricSample:
    """A number for the metrics, besides those of every engine; a counter if ``counts``, else a gauge."""

    name: str
    help: str
    value: float
    counts: bool = True
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stats:
    """The load of an engine.

    Attributes:
        cache_usage: fraction of the KV cache's blocks that requests hold.
        blocks: of the KV cache: free, cached (prefixes, evicted on demand), used (by requests).
        prefix_queries: prompt tokens looked up in the prefix cache since the start.
        prefix_hits: of these, cache hits.
        preemptions: since the start.
        speculation: None without speculation.
        free: sequences that may start in addition to the running ones.
        samples: further numbers, of the services that take part.
        ready: whether it takes requests now.
    """

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    blocks: Mapping[str, int] = field(default_factory=dict)
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    speculation: SpeculationCounts | None = None
    free: int = 0
    samples: Sequence[MetricSample] = ()
    ready: bool = True


class Backend(ABC):
    """An engine shared by several requests; called from one event loop.

    Args:
        context: longest sequence; None: no limit.
        vocabulary: token ids are in [0, vocabulary).
    """

    refusal = "nothing is completed here"
    hint = ""

    def __init__(self, context: int | None, vocabulary: int) -> None:
        self._context, self._vocabulary, self._open = context, vocabulary, True

    @property
    def context(self) -> int | None:
        """Longest sequence; None: no limit."""
        return self._context

    @property
    def vocabulary(self) -> int:
        """Token ids are in [0, vocabulary)."""
        return self._vocabulary

    @property
    def kv_tokens(self) -> int | None:
        """Tokens that the KV cache holds; None where the engine is elsewhere."""
        return None

    @property
    def failure(self) -> Exception | None:
        """The error that stopped the engine (a leaked block, a bug); else None."""
        return None

    @property
    def alive(self) -> bool:
        """False once the engine cannot run anything."""
        return self._open and self.failure is None

    async def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        id: str,
        priority: int = 0,
        deadline_s: float | None = None,
        salt: str = "",
    ) -> AsyncIterator[Event]:
        """The events of a request's completions; it starts when the first event is requested.

        Raises:
            DataError, SettingsError: (from the iterator) it can never run.
            BusyError: (from the iterator) too many requests wait.
        """
        raise DataError(self.refusal, hint=self.hint)
        yield  # an iterator of no events

    def cancel(self, id: str) -> None:  # noqa: B027  (nothing runs)
        """Cancel a request soon; unknown and finished ones are ignored."""

    @abstractmethod
    def stats(self) -> Stats:
        """The load; cheap enough for every request."""

    def block_map(self) -> BlockMap | None:
        """What the blocks of the KV cache are used for; None where the engine is elsewhere."""
        return None

    async def close(self) -> None:
        """End running requests and free their memory."""
        self._open = False


class EngineBackend(Backend):
    """attar's engine, in a separate thread.

    Args:
        streams: the engine; closed by ``close``.
        samples: of the services that take part.
    """

    def __init__(self, streams: AsyncEngine, samples: Callable[[], Sequence[MetricSample]] = tuple) -> None:
        runner = streams.engine.runner
        super().__init__(runner.context, streams.engine.vocabulary)
        self._streams, self._samples = streams, samples
        self._kv_dtype = str(getattr(runner, "facts", {}).get("kv_dtype", ""))
        self._store = getattr(getattr(runner, "pool", None), "store", None)

    @property
    def failure(self) -> Exception | None:
        return self._streams.failure

    @property
    def kv_tokens(self) -> int | None:
        manager = self._streams.engine.scheduler.manager
        return manager.capacity * manager.block_size

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, *, salt: str = "", **options: Any
    ) -> AsyncIterator[Event]:
        return self._streams.stream(prompt, params, **options, **self._sharing(salt))

    def _sharing(self, salt: str) -> dict[str, Any]:
        """Which weights a request runs with, and with whom its prefixes are shared."""
        return {"salt": salt}

    def prepare(self, adapter: LoraAdapter) -> Any:
        """What ``add_adapter`` takes; may take long, and is called in another thread.

        Raises:
            ModelError: the adapter does not fit the model.
        """
        return self._lora.prepare(adapter)

    async def add_adapter(self, key: str, adapter: Any) -> None:
        """Add a prepared adapter between two steps.

        Raises:
            ModelError: it does not fit the model.
        """
        await self._streams.call(lambda: self._lora.add(key, adapter))

    async def remove_adapter(self, key: str) -> bool:
        """Forget an adapter; False while a request has it."""

        def remove() -> bool:
            if self._streams.engine.uses(key):
                return False
            self._lora.remove(key)
            return True

        return await self._streams.call(remove)

    @property
    def _lora(self) -> Any:
        """A :class:`LoraRows` or :class:`CompiledLora`."""
        runner: Any = self._streams.engine.runner
        return runner.lora

    def score(
        self, prompt: Sequence[int], start: int, observe: PromptObserver, **options: Any
    ) -> AsyncIterator[Event]:
        """Runs a prompt; ``observe`` gets the logits that follow each of its tokens from ``start`` on, but
        the last. The options are those of :meth:`submit`."""
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        return self.submit(prompt, params, observe=(start, observe), **options)

    def cancel(self, id: str) -> None:
        self._streams.cancel(id)

    def stats(self) -> Stats:
        """Read without a lock: each number is consistent, and two of them may be a step apart."""
        scheduler, speculator = self._streams.engine.scheduler, self._streams.engine.speculator
        manager = scheduler.manager
        free, cached = manager.free, manager.cached
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free=max(scheduler.limits.sequences - len(scheduler.running), 0),
            cache_usage=1 - (free + cached) / manager.capacity,
            blocks={"free": free, "cached": cached, "used": manager.capacity - free - cached},
            prefix_queries=manager.stats.queries,
            prefix_hits=manager.stats.hit,
            preemptions=scheduler.preemptions,
            speculation=None if speculator is None else speculator.counts.copy(),
            samples=[*self._samples(), *self._states()],
        )

    def _states(self) -> list[MetricSample]:
        """Of a model with layers that carry states; forks that share one count each."""
        runner: Any = self._streams.engine.runner
        size = getattr(runner, "state_bytes", 0)
        if not size:
            return []
        snapshots = runner.states.snapshots
        kept, reused = (0, 0) if snapshots is None else (len(snapshots), snapshots.reused)
        held = (len(runner.states.sequences) + kept) * size
        return [
            MetricSample("state_bytes", "Bytes of states, of sequences and snapshots.", held, counts=False),
            MetricSample("state_snapshots", "Snapshots of states that are kept.", kept, counts=False),
            MetricSample("state_snapshots_reused", "Sequences that started from one.", reused),
        ]

    def block_map(self) -> BlockMap | None:
        open_blocks = list(getattr(self._store, "open", ()))
        return block_map(self._streams.engine.scheduler.manager, self._kv_dtype, open_blocks)

    async def close(self) -> None:
        await super().close()
        await self._streams.close()
