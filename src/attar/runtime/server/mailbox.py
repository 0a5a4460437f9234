"""Where events wait for a client that reads: a slow one holds up nobody, and what waits stays small.

    put(choice, event) ... fail(error)  →  take(): all that came, one event for each choice

Events of one choice are joined while they wait: pieces of text, tokens and log-probabilities one behind the
other. So a client that falls behind gets fewer and larger chunks, the engine never waits for it, and never
more than ``MAX_EVENTS`` events of a choice are kept, however long it sleeps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from attar.runtime.results import Event

MAX_EVENTS = 64  # events of one choice that wait before they are joined


class EventQueue:
    """Events on their way from the engine to one client; used from one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Event]] = {}  # by choice, in the order in which their first came
        self._failure: BaseException | None = None
        self._news = asyncio.Event()

    def __len__(self) -> int:
        """Events that wait."""
        return sum(map(len, self._waiting.values()))

    def put(self, choice: int, event: Event) -> None:
        """An event came; behind a failure none is of use."""
        if self._failure is not None:
            return
        waiting = self._waiting.setdefault(choice, [])
        waiting.append(event)
        if len(waiting) >= MAX_EVENTS:
            waiting[:] = [merge_events(waiting)]
        self._news.set()

    def fail(self, failure: BaseException) -> None:
        """Nothing more will come; of several failures the first is told."""
        self._failure = self._failure or failure
        self._news.set()

    async def take(self, silence_s: float | None = None) -> list[tuple[int, Event]]:
        """What waits; none where nothing came for so many seconds.

        Raises:
            what ``fail`` was given, behind the events that came before it.
        """
        if not self._news.is_set():
            try:
                async with asyncio.timeout(silence_s):
                    await self._news.wait()
            except TimeoutError:
                return []
        self._news.clear()
        waiting, self._waiting = self._waiting, {}
        if not waiting and self._failure is not None:
            raise self._failure
        if self._failure is not None:
            self._news.set()
        return [(choice, merge_events(events)) for choice, events in waiting.items()]


def merge_events(events: Sequence[Event]) -> Event:
    """One event that says what several of the same text say, in their order."""
    if len(events) == 1:
        return events[0]
    last = events[-1]
    return Event(
        last.request,
        last.sample,
        text="".join(event.text for event in events),
        token_ids=tuple(token for event in events for token in event.token_ids),
        logprobs=tuple(one for event in events for one in event.logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
        prompt_logprobs=next((e.prompt_logprobs for e in events if e.prompt_logprobs is not None), None),
        usage=last.usage,
    )
