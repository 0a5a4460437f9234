"""The event loop of a collection: Ctrl-C as a call, and notebooks, whose loop runs already."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any


@contextmanager
def interrupts(call: Callable[[], None]) -> Iterator[None]:
    """Call a function at each Ctrl-C; outside the main thread they go where they always go."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGINT, call)
    except (ValueError, RuntimeError):
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end; in a thread of its own where a loop runs already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work)
        return
    errors: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(work)
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
