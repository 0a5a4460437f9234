"""The target model after the nodes of a draft: rows of logits, warped when verification reaches them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from attar.runtime.completion import Completion
from attar.runtime.sampling.sample import sample
from attar.runtime.sampling.warp import SamplingRow, argmax, check_finite, warp
from attar.runtime.speculate.draft import Draft, Floats
from attar.runtime.speculate.proposer import SamplingRules


@dataclass(frozen=True, eq=False)
class TargetLogits:
    """The logits of a pass over a draft.

    A row is warped as in plain decoding, with the sequence continued by the path to its node. Rows off the
    accepted path are not computed; if a greedy request changes no logits, one argmax covers all rows.

    Args:
        logits: (n + 1, V), row i after node i; not modified.
        rules: warps and noise of the completion.

    Raises:
        NumericsError: from ``token`` and ``p``, where the row's logits are NaN or infinite.
    """

    logits: Tensor
    rules: SamplingRules
    draft: Draft

    @property
    def greedy(self) -> bool:
        """Whether the request takes the likeliest token."""
        return self._first.params.greedy

    def token(self, node: int) -> int:
        """Plain decoding's token after the node."""
        if self._likeliest is not None:
            tokens, largest = self._likeliest
            check_finite(math.isfinite(largest[node]))
            return tokens[node]
        key = self.rules.key(self.draft.depths[node])
        return sample(self.logits[node : node + 1], [self._row(node)], [key])[0]

    def p(self, node: int) -> Floats:
        """float32 (V,)."""
        p: Floats = warp(self.logits[node : node + 1], [self._row(node)])[0].cpu().numpy()
        return p

    @cached_property
    def _first(self) -> SamplingRow:
        """The warps of the row after node 0; if they change no logits, no later ones do."""
        return self.rules.row()

    @cached_property
    def _likeliest(self) -> tuple[list[int], list[float]] | None:
        """The likeliest token of every row and its logit; None where plain decoding takes another."""
        return argmax(self.logits.float()) if self.greedy and not self._first.adjusts else None

    def _row(self, node: int) -> SamplingRow:
        return self.rules.row(self.draft.path_tokens(self.draft.path(node)))


PAST_END = -1  # in place of a token after the end of the completion; no draft equals it


@dataclass(frozen=True, eq=False)
class CompletionLogits(TargetLogits):
    """Logits of a pass; after the end of the completion every draft is rejected."""

    completion: Completion

    def token(self, node: int) -> int:
        return PAST_END if self._ended(node) else super().token(node)

    def p(self, node: int) -> Floats:
        if self._ended(node):  # any distribution: these tokens are cut off
            size = self.logits.shape[1]
            return np.full(size, 1 / size, dtype=np.float32)
        return super().p(node)

    def _ended(self, node: int) -> bool:
        return self.completion.ends_within(self.draft.path_tokens(self.draft.path(node)))
