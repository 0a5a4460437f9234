"""StreamingLLM: the first places (attention sinks) and a window of the newest are seen, nothing between.

    token p sees places j < S and p - w < j <= p;  the sinks stand directly before the window: the distance of
    p to sink j is min(p, S + w - 1) - j

Letters: S sinks, w the window. Source: StreamingLLM (Xiao et al. 2023, arXiv 2309.17453), section 3.2.

Differs from the paper's code, not from its mathematics: there keys are kept unrotated and rotated by their
place in the cache at each step. Rotary attention sees differences of positions only, so here window and
queries keep their true positions, and queries are turned back by max(0, p + 1 - S - w) where they meet the
sinks. Stored keys never change, so blocks can be shared, found by prefix, quantized and copied as always, and
blocks between sinks and window are simply given back. It is no long memory: what left the window is gone.
"""

from __future__ import annotations

from dataclasses import dataclass

from attar.errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """StreamingLLM.

    Args:
        sinks: S, first places that stay.
        window: w, newest places that stay, the token itself among them.
    """

    sinks: int = 4
    window: int = 1020

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise SettingsError("sinks", self.sinks, "0 or more")
        if self.window < 1:
            raise SettingsError("window", self.window, "at least 1")

    @property
    def budget(self) -> int:
        """Places that a token sees at most."""
        return self.sinks + self.window

    def due(self, places: int, prompt_done: bool) -> int | None:
        """Never: nothing is packed, ``kv/block_manager.py`` gives blocks back behind the window."""
        return None

    def most(self, chunk: int, block_size: int) -> int | None:
        """Places of the blocks that a sequence holds at once, when a step runs at most ``chunk`` tokens."""
        blocks = -(-self.sinks // block_size) + -(-(self.window + chunk) // block_size) + 1
        return blocks * block_size
