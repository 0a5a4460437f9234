"""A draft of a model while it grows: a chain, and beside each of its tokens the next best of the same row.

    x_i        goes on: the likeliest token where the request is greedy; else the first of a race over q_i
    siblings   the row's next ones: the next likeliest; else the next of the race (Gumbel top-k)

A row costs a pass of the draft model; siblings are read from rows that are there anyway. With the target's
own noise (coupled) the race is the target's, run over q_i: its leaders are what the target most likely draws.
With the round's own noise (exact) they are draws from q_i without putting back, in the order drawn.

The chain ends behind an end token, and behind a draft in whose row the likeliest token has less than
``doubt``: the row is made before its token is drawn, so which tokens are kept never depends on how they fell
out. Which siblings are run is decided elsewhere (``siblings.py``), before anything is drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.sample import draw_distinct
from attar.runtime.sampling.warp import SamplingRow, adjust, check_finite, largest_indices, likeliest, warp
from attar.runtime.speculate.draft import LEVELS, Draft, Floats, kind_of
from attar.runtime.speculate.noise import DraftRules
from attar.runtime.speculate.proposer import DraftRequest

GREEDY = SamplingRow(SamplingParams(temperature=0.0))


@dataclass
class GrowingDraft:
    """A draft under way.

    Args:
        wish: whose.
        text: the sequence so far, in tokens of the draft model; x_1..x_(i-1) behind it.
        certain: how many of these are text.
        most: K.
        ends: nothing is drafted behind one.
        doubt: see :class:`attar.runtime.speculate.model.DraftModel`.
        branches: drafts of a row at most, x_i among them.
    """

    wish: DraftRequest
    text: list[int]
    certain: int
    most: int
    ends: frozenset[int]
    doubt: float
    branches: int
    tokens: list[int] = field(default_factory=list)
    siblings: list[list[int]] = field(default_factory=list)
    q: list[Floats] = field(default_factory=list)
    open: bool = True

    def extend(self, logits: Tensor) -> None:
        """One more draft, and its siblings, from the logits (1, V) behind the last; or none."""
        try:
            (token, *others), largest = self._chosen(logits)
        except Exception:  # NaN, nothing that may follow is a token of both, a grammar that cannot go on
            self.open = False
            del self.q[len(self.tokens) :]
            return
        self.tokens.append(token)
        self.siblings.append(others)
        sure = largest is None or largest >= self.doubt
        self.open = sure and len(self.tokens) < self.most and token not in self.ends

    def draft(self) -> Draft | None:
        """What was drafted, the chain first, then the siblings from the top down; None where that is nothing.

        Siblings are counted under their rank and depth.
        """
        if not self.tokens:
            return None
        if self.branches == 1:
            return Draft.chain(self.tokens, self.q or None)
        K = len(self.tokens)
        tokens, parents = [*self.tokens], [*range(K)]
        kinds = [kind_of(0, depth) for depth in range(1, K + 1)]
        for depth, others in enumerate(self.siblings[: LEVELS - 1], 1):
            tokens += others
            parents += [depth - 1] * len(others)
            kinds += [kind_of(rank, depth) for rank in range(1, len(others) + 1)]
        q = [self.q[parent] for parent in parents] if self.q else None
        return Draft(tuple(tokens), tuple(parents), q, "distinct" if q else "fixed", tuple(kinds))

    def _chosen(self, logits: Tensor) -> tuple[list[int], float | None]:
        """The tokens, best first, and the probability of the likeliest; None where nobody asks for it."""
        rules = self.wish.rules
        row = GREEDY if rules is None else rules.row(self.tokens)
        if rules is None or row.params.greedy:
            x = adjust(logits, [row])
            return _likeliest(x, self.branches), float(x.softmax(-1).amax()) if self.doubt else None
        p = warp(logits, [row])
        if isinstance(rules, DraftRules):
            self.q.append(p[0].cpu().numpy())
        return draw_distinct(p[0], rules.key(len(self.tokens)), self.branches), float(p.amax())


def _likeliest(x: Tensor, count: int) -> list[int]:
    """The largest of (1, V), in order; behind the first only those that are not banned.

    Raises:
        NumericsError: as :func:`attar.runtime.sampling.warp.likeliest`.
    """
    if count == 1:
        return likeliest(x)
    count = min(count, x.shape[1])
    if x.device.type == "cpu":
        row = x[0].numpy()
        found = largest_indices(row, count)
        values = row[found]
    else:
        values, found = (each.cpu().numpy() for each in x[0].topk(count))
    check_finite(math.isfinite(values[0]))
    kept: list[int] = found[values > -np.inf].tolist()
    return kept
