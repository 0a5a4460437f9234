"""Threads for what takes time, so that the event loop never does: short work apart from long work.

A client that sends long texts fills the lane of long texts, and nobody else waits for it. What cannot be
interrupted (a tokenizer at work) is bounded in length before it begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

SMALL = 64 << 10  # bytes or characters; shorter work need not go to a lane of its own


class ThreadPools:
    """Three pools of threads."""

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(4, "attar-small")
        self._large = ThreadPoolExecutor(1, "attar-large")
        self._answers = ThreadPoolExecutor(2, "attar-answers")

    async def small(self, act: Callable[..., Any], *values: Any) -> Any:
        """Run what takes milliseconds."""
        return await _run(self._small, act, values)

    async def sized(self, size: int, act: Callable[..., Any], *values: Any) -> Any:
        """Run what takes time by its size, in characters or tokens."""
        return await _run(self._small if size <= SMALL else self._large, act, values)

    async def answer(self, act: Callable[..., Any], *values: Any) -> Any:
        """Run what makes an answer."""
        return await _run(self._answers, act, values)

    def close(self) -> None:
        """Threads end when their work is done; what has not begun is dropped."""
        for pool in (self._small, self._large, self._answers):
            pool.shutdown(wait=False, cancel_futures=True)


async def _run(pool: ThreadPoolExecutor, act: Callable[..., Any], values: tuple[Any, ...]) -> Any:
    return await asyncio.get_running_loop().run_in_executor(pool, partial(act, *values))
