"""SnapKV: after the prompt, each head keeps the entries that the prompt's last queries attend to.

    a_j = sum over the last w queries of their softmax weight on entry j < n - w, mean over the group's heads
    s = a smoothed: mean of 5 neighbours (zeros beyond the ends);  keep the C - w largest s, and the last w

Letters: n entries of the prompt, w window of queries, C capacity. Nothing is dropped where n <= C, and
all generated tokens stay. Source: SnapKV (Li et al. 2024, arXiv 2404.14469), section 4, and
``snapkv_utils.py`` (average pooling, the class's default). Differs: the authors repeat the heads of keys
first and choose for each query head, which saves no memory with grouped queries; here the group chooses
together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attar.errors import SettingsError
from attar.runtime.kv.evict.h2o import EntryIndices, Scores, with_newest


@dataclass(frozen=True, kw_only=True)
class SnapKV:
    """SnapKV.

    Args:
        capacity: C, entries kept of a prompt.
        window: w, last queries of the prompt that vote; their entries stay.
        kernel: neighbours that are averaged, odd.
    """

    capacity: int = 1024
    window: int = 32
    kernel: int = 5

    def __post_init__(self) -> None:
        if self.window < 1:
            raise SettingsError("window", self.window, "at least 1")
        if self.capacity < self.window:
            raise SettingsError("capacity", self.capacity, f"at least the window, {self.window}")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise SettingsError("kernel", self.kernel, "odd")

    @property
    def budget(self) -> int:
        """Entries kept of a prompt."""
        return self.capacity

    def due(self, entries: int, prompt_done: bool) -> int | None:
        """Entries to keep now, when a prompt longer than C is computed; not called for a shorter one, nor for
        a packed sequence."""
        return self.capacity if prompt_done and entries > self.capacity else None

    def most(self, chunk: int, block_size: int) -> int | None:
        """No bound: the whole prompt is cached before it is packed, and all that follows stays."""
        return None

    def choose(self, scores: Scores, window: int | None = None) -> EntryIndices:
        """The entries that stay, ascending; int64 (kv_heads, C).

        Args:
            scores: a, (kv_heads, n - w).
            window: w where fewer queries than the setting's voted.
        """
        w = self.window if window is None else window
        before = scores.shape[1]
        smooth = smoothed(scores, self.kernel)
        chosen = np.argsort(-smooth, axis=1, kind="stable")[:, : self.capacity - w]
        return with_newest(chosen, before, before + w)


def smoothed(scores: Scores, kernel: int) -> Scores:
    """Mean of ``kernel`` neighbours along the last axis, of the same length, zeros beyond the ends."""
    edge = kernel // 2
    padded = np.pad(scores, ((0, 0), (edge, edge)))
    neighbours = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=1)
    return np.asarray(neighbours.mean(axis=-1), dtype=np.float32)
