"""StreamingLLM: a token sees the first entries (attention sinks) and a window of the newest.

    token p sees entries j < S and p - w < j <= p; the sinks stand directly before the window: the distance of
    p to sink j is min(p, S + w - 1) - j

Letters: S sinks, w the window. Source: StreamingLLM (Xiao et al. 2023, arXiv 2309.17453), section 3.2.

Differs from the paper's code, not from its mathematics: there keys are stored unrotated and rotated by their
index in the cache at each step. Rotary attention depends on differences of positions only, so here window and
queries keep their true positions, and queries are rotated back by max(0, p + 1 - S - w) for the sinks. Stored
keys never change, so blocks can be shared, reused by prefix, quantized and copied as usual, and blocks
between sinks and window are released. It is no long memory: entries outside the window are lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from attar.options import check_at_least


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """StreamingLLM.

    Args:
        sinks: S, first entries that stay.
        window: w, newest entries that stay, the token itself included.
    """

    sinks: int = 4
    window: int = 1020

    def __post_init__(self) -> None:
        check_at_least(self, sinks=0, window=1)

    @property
    def budget(self) -> int:
        """Most entries that a token sees."""
        return self.sinks + self.window

    def due(self, entries: int, prompt_done: bool) -> int | None:
        """None: nothing is packed, the block manager releases blocks before the window."""
        return None

    def most(self, chunk: int, block_size: int) -> int | None:
        """Most slots of a sequence's blocks, when a step runs at most ``chunk`` tokens."""
        blocks = -(-self.sinks // block_size) + -(-(self.window + chunk) // block_size) + 1
        return blocks * block_size
