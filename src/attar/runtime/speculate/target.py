"""The target after the nodes of a draft: logits that are warped when a row is needed."""

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

    A row is warped as plain decoding would, with the text continued by the path to it. Rows off the walked
    path cost nothing; where a greedy request changes no logits, the likeliest of all rows is found at once.

    Args:
        logits: (n + 1, V), row i after node i; not modified.
        rules: the text's warps and noise.

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
        """What decides the row after node 0; where it changes no logits, no later one does."""
        return self.rules.row()

    @cached_property
    def _likeliest(self) -> tuple[list[int], list[float]] | None:
        """Of every row the likeliest token and its logit; None where they are not plain decoding's."""
        return argmax(self.logits.float()) if self.greedy and not self._first.adjusts else None

    def _row(self, node: int) -> SamplingRow:
        return self.rules.row(self.draft.text(self.draft.path(node)))


BEHIND = -1  # stands for a token after the end; no draft is it


@dataclass(frozen=True, eq=False)
class Nodes(TargetLogits):
    """Args: as of :class:`TargetLogits`, and the text itself."""

    text: Completion

    def token(self, node: int) -> int:
        return BEHIND if self._over(node) else super().token(node)

    def p(self, node: int) -> Floats:
        if self._over(node):  # any law will do
            size = self.logits.shape[1]
            return np.full(size, 1 / size, dtype=np.float32)
        return super().p(node)

    def _over(self, node: int) -> bool:
        return self.text.ends_within(self.draft.text(self.draft.path(node)))
