"""Random numbers of drafting and verification, from the keyed streams of ``sampling/sample.py``.

    use                               position       purpose            counter
    a token of plain decoding         its own        TOKEN              the token
    acceptance of draft i             the round's    ACCEPT             i
    the token after the accepted      its own        RESAMPLE           the token
    drafts drawn from q, "exact"      the round's    DRAFT + depth      the token

The round's position is that of the first token it decides, so no two rounds of a sequence share it. So
every draw has fresh noise, which exactness needs, and depends neither on the batch nor on the order of calls.
Acceptance keyed by the token's own position would not be exact: block verification uses the numbers, and the
drafts, of positions after the last accepted token, and a later round would use them again. Likewise
drafts for "exact" verification are drawn from streams of their round (:class:`DraftRules`), while drafts for
coupled verification use the noise of the target's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from attar.runtime.sampling.sample import ACCEPT, RESAMPLE, TOKEN, draw, noise_key, uniforms
from attar.runtime.sampling.warp import SamplingRow
from attar.runtime.speculate.draft import Floats
from attar.runtime.speculate.proposer import SamplingRules

DRAFT = 16
"""First of the purposes of drafting, one for each depth."""


@dataclass(frozen=True)
class Noise:
    """Noise of one sequence in one round.

    Args:
        seed: of the request.
        sample: index of the completion in its request.
        position: of the first token that the round decides.
    """

    seed: int
    sample: int
    position: int

    def accepts(self, node: int, chance: float) -> bool:
        """Whether draft ``node`` is accepted: true with probability ``chance``, exactly so for 0 and 1."""
        if chance >= 1.0:
            return True
        return bool(uniforms(self._coins, np.array([node]))[0] <= chance)

    def token(self, depth: int, p: Floats) -> int:
        """What plain decoding draws from p (V,), ``depth`` tokens after the round's first."""
        return _draw(p, noise_key(self.seed, self.sample, self.position + depth, TOKEN))

    def resample(self, depth: int, weights: Floats) -> int:
        """A draw from weights (V,), not all 0, from a stream of its own; at most once a round."""
        return _draw(weights, noise_key(self.seed, self.sample, self.position + depth, RESAMPLE))

    def drafting(self, depth: int) -> int:
        """The key of drafts for "exact" verification, ``depth`` tokens after the round's first."""
        return noise_key(self.seed, self.sample, self.position, DRAFT + depth)

    @cached_property
    def _coins(self) -> int:
        return noise_key(self.seed, self.sample, self.position, ACCEPT)


@dataclass(frozen=True)
class DraftRules:
    """The rules of a completion with the drafting noise of one round: for drafts verified as "exact"."""

    rules: SamplingRules
    noise: Noise

    def row(self, drafted: Sequence[int] = ()) -> SamplingRow:
        """The warps of the token after ``drafted``."""
        return self.rules.row(drafted)

    def key(self, ahead: int = 0) -> int:
        """The noise key of the draft ``ahead`` positions after the round's first."""
        return self.noise.drafting(ahead)


def _draw(weights: Floats, key: int) -> int:
    return draw(torch.from_numpy(np.ascontiguousarray(weights))[None], [key])[0]
