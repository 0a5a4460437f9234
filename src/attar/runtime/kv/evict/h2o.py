"""H2O: the heavy hitters, entries that got the most attention so far, and the newest.

    s_j = sum over all queries so far of their softmax weight on entry j        for each layer and head
    keep  the r newest, and of the others the k with the largest s, in their order; they keep their s

Letters: k ``heavy``, r ``recent``, n entries. Source: H2O (Zhang et al. 2023, arXiv 2306.14048), Algorithm 1,
and ``h2o_hf/utils_real_drop/modify_llama.py``. With grouped queries the group's weights are summed, so that
each head of keys has one choice. Positions stay the true ones. The simulation in the authors'
``utils_lm_eval`` also sums over later queries; here only past queries count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attar.options import check_at_least

Scores = NDArray[np.float32]
EntryIndices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class H2O:
    """H2O.

    Args:
        heavy: k, heavy hitters.
        recent: r, newest entries, at least 1.
        slack: entries beyond k + r before packing; 0 is the paper.
    """

    heavy: int = 512
    recent: int = 512
    slack: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, heavy=0, recent=1, slack=0)

    @property
    def budget(self) -> int:
        """Entries that are kept."""
        return self.heavy + self.recent

    def due(self, entries: int, prompt_done: bool) -> int | None:
        """Entries to keep now; None: nothing is packed yet."""
        return self.budget if entries > self.budget + self.slack else None

    def most(self, chunk: int, block_size: int) -> int | None:
        """Most entries of a sequence, when a step runs at most ``chunk`` of its tokens."""
        return self.budget + self.slack + chunk

    def choose(self, scores: Scores) -> EntryIndices:
        """The entries that stay, ascending; int64 (kv_heads, k + r) of scores (kv_heads, n), n > k + r."""
        n = scores.shape[1]
        heaviest = np.argsort(-scores[:, : n - self.recent], axis=1, kind="stable")[:, : self.heavy]
        return with_newest(heaviest, n - self.recent, n)


def with_newest(chosen: EntryIndices, start: int, stop: int) -> EntryIndices:
    """Chosen entries (kv_heads, m) in ascending order, followed by [start, stop)."""
    newest = np.broadcast_to(np.arange(start, stop), (len(chosen), stop - start))
    return np.concatenate([np.sort(chosen, axis=1), newest], axis=1)
