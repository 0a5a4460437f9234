"""torch with one thread: its own spin for a while after each operation, and sum in an order of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch works in the calling thread alone: sums have one order, and nothing is taken from the
    threads of a kernel that runs next. Threads that are begun inside have none of torch's either."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
