"""Memory for what is read over and over: in huge pages where the system gives them.

Reading weights from pages of 4 KiB costs up to half the bandwidth in address translation. Linux gives pages
of 2 MiB to memory that asks (``madvise``); elsewhere this is ordinary memory.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

PIECE = 1 << 26  # bytes that are asked of the system at a time, at least
PAGE = 1 << 21
LINE = 64


class Arena:
    """Hands out bytes, aligned to cache lines, from few large pieces. They live as long as their tensors."""

    def __init__(self, piece: int = PIECE) -> None:
        self._piece = piece
        self._room = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> Tensor:
        """Zeros, uint8 (nbytes,)."""
        whole = -(-nbytes // LINE) * LINE
        if whole > len(self._room):
            self._room = huge(max(whole, self._piece))
        taken, self._room = self._room[:nbytes], self._room[whole:]
        return taken


def huge(nbytes: int) -> Tensor:
    """Zeros of their own, uint8 (at least nbytes,), starting at a page."""
    whole = max(-(-nbytes // PAGE), 1) * PAGE
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(whole, dtype=torch.uint8)
    room = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        room.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(room, dtype=torch.uint8)
