"""torch with one thread: more spin after each operation, and sum in an order that depends on their number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch uses the calling thread alone: sums have one order, and no spinning thread slows the
    kernel that runs next. Threads started inside inherit this."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
