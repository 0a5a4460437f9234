"""Reread: keep what a second reading of the prompt would attend to; one budget for all layers and heads.

    q'_t = q_t rotated to the position  n + t mod R        t every stride-th position of the prompt
    s_j  = max over t, and over the group's heads, of softmax_j(scaling q'_t . k_j)        j in [0, n)
    keep the first ``sinks`` and last ``recent`` entries of each head, and of all others, over all layers and
    heads together, those with the largest s: capacity x layers x heads entries in all

Continuations quote the prompt: copying heads attend to the token after an earlier occurrence of the current
one. After one pass over the prompt, most of its entries have received no attention yet, so sums of attention
(H2O) and the last queries (SnapKV) cannot tell which will be needed. A second reading can: each token then
attends to its own first occurrence. Local heads need few entries, copying heads need most.

Letters: n entries of the prompt, q, k queries and keys (rotated by their positions), R positions of a piece.
Source: KVzip (Kim et al. 2025, arXiv 2505.23416), section 3: the score, and one threshold for all heads
("non-uniform"). Differs: there the model runs the prompt once more to get q'; here the queries of the first
pass are rotated to positions after the prompt, which costs attention only, and every second one is enough.
Each piece uses the same R positions, which keeps them near the positions of the training.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attar.errors import SettingsError
from attar.options import check_at_least
from attar.runtime.kv.evict.h2o import Scores

PIECE = 512  # R


@dataclass(frozen=True, kw_only=True)
class Reread:
    """Reread.

    Args:
        capacity: entries kept of a prompt, mean over layers and heads.
        recent: newest entries that every head keeps.
        sinks: first entries that every head keeps.
        stride: every ``stride``-th query of the prompt attends again.
    """

    capacity: int = 1024
    recent: int = 128
    sinks: int = 4
    stride: int = 2

    def __post_init__(self) -> None:
        check_at_least(self, recent=1, sinks=0, stride=1)
        if self.capacity < self.recent + self.sinks:
            least = self.recent + self.sinks
            raise SettingsError("capacity", self.capacity, f"at least {least}, what every head keeps")

    @property
    def budget(self) -> int:
        """Entries kept of a prompt."""
        return self.capacity

    def due(self, entries: int, prompt_done: bool) -> int | None:
        """Entries to keep now, when a prompt longer than the capacity is computed; called once."""
        return self.capacity if prompt_done and entries > self.capacity else None

    def most(self, chunk: int, block_size: int) -> int | None:
        """No bound: the whole prompt is cached before it is packed, and all that follows stays."""
        return None

    def choose(self, scores: Scores) -> NDArray[np.bool_]:
        """The entries that stay: bool (layers, kv_heads, n), capacity x layers x kv_heads of them True.

        Args:
            scores: s, (layers, kv_heads, n) with n > capacity; of equal ones the first stay.
        """
        layers, kv_heads, n = scores.shape
        wanted = scores.copy()
        wanted[..., : self.sinks] = wanted[..., n - self.recent :] = np.inf
        best = np.argsort(-wanted, axis=None, kind="stable")[: self.capacity * layers * kv_heads]
        keep = np.zeros(scores.size, dtype=np.bool_)
        keep[best] = True
        return keep.reshape(scores.shape)
