"""What the server needs of an engine and of a tokenizer, and nothing more."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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
