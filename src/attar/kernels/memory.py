"""Memory for weights and the KV cache, in huge pages where the system has them.

Reading weights from pages of 4 KiB costs up to half the bandwidth in address translation. Linux backs memory
with pages of 2 MiB on request (``madvise``); elsewhere this is ordinary memory.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 26  # allocated at a time, at least
PAGE = 1 << 21
LINE = 64


class Arena:
    """Allocates bytes, aligned to cache lines, from few large chunks, which live as long as their tensors."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._free = torch.empty(0, dtype=torch.uint8)

    def allocate(self, nbytes: int) -> Tensor:
        """Zeros, uint8 (nbytes,)."""
        lines = -(-nbytes // LINE) * LINE
        if lines > len(self._free):
            self._free = huge_pages(max(lines, self._chunk_bytes))
        data, self._free = self._free[:nbytes], self._free[lines:]
        return data


def huge_pages(nbytes: int) -> Tensor:
    """Zeros, uint8 (at least nbytes,), starting at a page."""
    size = max(-(-nbytes // PAGE), 1) * PAGE
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
