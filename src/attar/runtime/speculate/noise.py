"""The verifier's random numbers, from the keyed streams of ``sampling/sample.py``.

    what                              position       purpose            counter
    plain decoding's own draw         its own        TOKEN              the token
    whether draft i is accepted       the round's    ACCEPT             i
    the token after the accepted     its own        RESAMPLE           the token
    drafts of a q, if not coupled     the round's    DRAFT + depth      the token

The round's position is that of the first token it decides: no two rounds of a sequence share it. So every
draw uses noise that nothing else has used, as exactness requires, and depends neither on the batch nor on the
order of the calls. Coins by the token's own position would not do: block verification uses the coins, and the
drafts, of positions after the last accepted token, and a later round would use them again. For the same
reason drafts that are verified as "exact" are drawn from streams of their round (:class:`DraftRules`), while
coupled ones are drawn from the same noise as the target's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from attar.runtime.sampling.sample import ACCEPT, RESAMPLE, TOKEN, draw, noise_key, uniforms
from attar.runtime.speculate.draft import Floats

if TYPE_CHECKING:
    from attar.runtime.sampling.warp import SamplingRow
    from attar.runtime.speculate.proposer import SamplingRules

DRAFT = 16
"""First of the purposes of drafting, one for each depth; smaller numbers are free for others."""


@dataclass(frozen=True)
class Noise:
    """The random numbers of one sequence in one round.

    Args:
        sample: which of its completions.
        position: of the first token that the round decides, in its sequence.
    """

    seed: int
    sample: int
    position: int

    def accepts(self, node: int, chance: float) -> bool:
        """Draft ``node``'s coin: true with this chance, always where it is 1 and never where it is 0."""
        if chance >= 1.0:
            return True
        return bool(uniforms(self._coins, np.array([node]))[0] <= chance)

    def token(self, depth: int, p: Floats) -> int:
        """Plain decoding's draw from p (V,), ``depth`` tokens after the round's first."""
        return _draw(p, noise_key(self.seed, self.sample, self.position + depth, TOKEN))

    def rest(self, depth: int, weights: Floats) -> int:
        """A draw from weights (V,), not all 0, with noise of its own; once in a round."""
        return _draw(weights, noise_key(self.seed, self.sample, self.position + depth, RESAMPLE))

    def drafting(self, depth: int) -> int:
        """The stream for drafts at ``depth`` tokens after the round's first, where they are not coupled."""
        return noise_key(self.seed, self.sample, self.position, DRAFT + depth)

    @cached_property
    def _coins(self) -> int:
        return noise_key(self.seed, self.sample, self.position, ACCEPT)


@dataclass(frozen=True)
class DraftRules:
    """A sequence's rules with noise for this round's drafts alone: for drafts verified "exact"."""

    rules: SamplingRules
    noise: Noise

    def row(self, drafted: Sequence[int] = ()) -> SamplingRow:
        """The warps of the token after ``drafted``."""
        return self.rules.row(drafted)

    def key(self, ahead: int = 0) -> int:
        """The noise of the draft ``ahead`` positions after the round's first."""
        return self.noise.drafting(ahead)


def _draw(weights: Floats, key: int) -> int:
    return draw(torch.from_numpy(np.ascontiguousarray(weights))[None], [key])[0]
