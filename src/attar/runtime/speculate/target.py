"""The target's distributions after the nodes of a draft: logits warped on demand, or given rows."""

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
from attar.runtime.speculate.noise import Noise
from attar.runtime.speculate.proposer import SamplingRules


@dataclass(frozen=True, eq=False)
class TargetLogits:
    """The logits of a pass over a draft.

    A row is warped as in plain decoding, with the sequence continued by the path to it. Rows off the walked
    path cost nothing; where a greedy request changes no logits, the likeliest of all rows is found at once.

    Args:
        logits: (n + 1, V), row i after node i; not modified.
        rules: the sequence's warps and noise.

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
        """The warps of the row after node 0; where they change no logits, no later ones do."""
        return self.rules.row()

    @cached_property
    def _likeliest(self) -> tuple[list[int], list[float]] | None:
        """Of every row the likeliest token and its logit; None where they are not plain decoding's."""
        return argmax(self.logits.float()) if self.greedy and not self._first.adjusts else None

    def _row(self, node: int) -> SamplingRow:
        return self.rules.row(self.draft.text(self.draft.path(node)))


@dataclass(frozen=True, eq=False)
class Rows:
    """Given distributions: for tests, and for acceptance rates computed without a model.

    Args:
        rows: p (n + 1, V), row i after node i.
    """

    rows: Floats
    draft: Draft
    noise: Noise

    @property
    def greedy(self) -> bool:
        """Whether every row is one-hot."""
        return bool((np.count_nonzero(self.rows, axis=-1) == 1).all())

    def token(self, node: int) -> int:
        """Plain decoding's token after the node."""
        return self.noise.token(self.draft.depths[node], self.rows[node])

    def p(self, node: int) -> Floats:
        """Its row."""
        row: Floats = self.rows[node]
        return row


AFTER_END = -1  # in place of a token after the end; equals no draft


@dataclass(frozen=True, eq=False)
class Nodes(TargetLogits):
    """A sequence that may end inside a draft. Args: as of :class:`TargetLogits`, and its completion."""

    text: Completion

    def token(self, node: int) -> int:
        return AFTER_END if self._over(node) else super().token(node)

    def p(self, node: int) -> Floats:
        if self._over(node):  # any distribution will do
            size = self.logits.shape[1]
            return np.full(size, 1 / size, dtype=np.float32)
        return super().p(node)

    def _over(self, node: int) -> bool:
        return self.text.ends_within(self.draft.text(self.draft.path(node)))
