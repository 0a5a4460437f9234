"""What a pass gains by drafts that other processes make: how long to wait for them, and how deep they are.

    pays        (B + drafted) / (w + t(B, n))  >=  MIN_SPEEDUP B / t(B, B)      w: until offers arrive

Letters: B sequences that decode, n tokens of the pass, t its seconds (``latency.py``).

How far a drafter drafts for a sequence: on and on while its drafts are used, else a token now and then.

    unused      tokens that were committed since a draft was accepted
    gap         tokens between two questions, once PATIENCE are unused
    question    asks for one token: what is committed in its place says whether it was right
    answer      of use (right, and drafts pay): gap // 2; of none: min(2 gap + 1, MOST_GAP); gap 0: drafts on

So a drafter that is of no use drafts one token in MOST_GAP + 1, and one whose guesses become right drafts on
after a few questions, each sooner than the one before. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from attar.runtime.speculate.policy import MIN_SPEEDUP, DraftPolicy

PATIENCE, MOST_GAP = 8, 31


class DraftDemand:
    """What is asked of a drafter for one sequence.

    Args:
        length: tokens of the sequence now.
        useful: whether drafts are expected to pay; else only questions are asked.

    Attributes:
        gap: tokens between two questions; 0: it drafts on.
    """

    def __init__(self, length: int, useful: bool = True) -> None:
        self.gap = 0 if useful else 1
        self._used, self._question = length - (0 if useful else PATIENCE), length

    def used(self, length: int) -> None:
        """Tokens of a draft were accepted; the sequence has ``length``."""
        self._used, self.gap = length, 0

    def answered(self, length: int, useful: bool) -> None:
        """A guess was of use, or of none."""
        if length - self._used >= PATIENCE:
            self.gap = self.gap // 2 if useful else min(2 * self.gap + 1, MOST_GAP)

    def ahead(self, length: int, most: int) -> int:
        """Tokens that may be drafted ahead of ``length``: ``most``, one for a question, or none."""
        if self.gap and length - self._question <= self.gap:
            return 0
        self._question = length
        return 1 if self.gap else most


def best_depth(policy: DraftPolicy, batch: int, most: int) -> tuple[int, float]:
    """Tokens of a draft that give a batch the highest speed, where drafting takes no time, and how many of
    them are expected to be accepted; at least 1."""
    target, best, choice = policy.latency.target, 0.0, (1, 0.0)
    survival, gain = 1.0, 0.0
    for depth, rate in enumerate(policy.acceptance.rates(-1, 0, most), 1):
        survival *= rate
        gain += survival
        speed = (1 + gain) / target(batch, batch * (1 + depth))
        if speed > best:
            best, choice = speed, (depth, gain)
    return choice


def best_wait(
    waits: Sequence[float], ready: int, batch: int, rates: Sequence[float], policy: DraftPolicy
) -> float:
    """Seconds to wait for offers; 0 where waiting does not pay.

    Args:
        waits: seconds until each offer that is under way, in ascending order.
        ready: sequences whose offers are there.
        batch: sequences that decode.
        rates: acceptance rates by depth.
    """
    if not waits or not policy.latency.known:
        return 0.0
    gains = list(itertools.accumulate(itertools.accumulate(rates, lambda survival, rate: survival * rate)))
    speeds = [_speed(policy, batch, ready, 0.0, gains)]
    speeds += [_speed(policy, batch, ready + count, wait, gains) for count, wait in enumerate(waits, 1)]
    best = max(range(len(speeds)), key=speeds.__getitem__)
    return waits[best - 1] if best and speeds[best] >= MIN_SPEEDUP * speeds[0] else 0.0


def _speed(policy: DraftPolicy, batch: int, drafted: int, wait: float, gains: Sequence[float]) -> float:
    """Tokens a second with drafts for so many sequences of a batch, of the best depth."""
    if not drafted:
        return batch / (wait + policy.latency.target(batch, batch))
    return max(
        (batch + drafted * gain) / (wait + policy.latency.target(batch, batch + drafted * depth))
        for depth, gain in enumerate(gains, 1)
    )
