"""Acceptance rates: how likely a draft is accepted, given that the one before it was.

    a_l = (s + PRIOR a') / (c + PRIOR)      s of c drafts of level l accepted; both decay with every draft
    a'  = a_(l-1)                           over all sequences
    a'  = a_(l-1) + the difference that level l makes over all sequences          of one sequence

A kind is a group and a level l in it, from 1: for a chain of a draft model the level is the depth, for
n-grams the number of tokens that matched before. Only drafts whose parent was accepted are counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from attar.runtime.speculate.draft import Draft

LEVELS = 32
FIRST = 0.6  # rate of level 1 of a group that was never drafted
PRIOR = 4.0  # drafts
DECAY, OWN_DECAY = 0.99, 0.97

Counts = dict[int, tuple[float, float]]  # kind: accepted, drafted


def kind_of(group: int, level: int) -> int:
    """The kind of a level; levels from LEVELS - 1 on are one."""
    return group * LEVELS + min(level, LEVELS - 1)


def kinds_of(draft: Draft) -> Sequence[int]:
    """The kind of each draft of a tree: its own, or its depth."""
    return draft.kinds or [kind_of(0, depth) for depth in draft.depths[1:]]


class AcceptanceRates:
    """Rates of all sequences."""

    def __init__(self) -> None:
        self._all: Counts = {}
        self._own: dict[int, Counts] = {}

    def rates(
        self, sequence: int, group: int = 0, levels: int = LEVELS - 1, first: float = FIRST
    ) -> list[float]:
        """a of levels 1..``levels`` of a group; ``first`` where nothing of the group was drafted."""
        own, rates = self._own.get(sequence, {}), list[float]()
        pooled = rate = first
        for level in range(1, levels + 1):
            kind, before = kind_of(group, level), pooled
            pooled = _posterior(self._all.get(kind), pooled)
            rate = _posterior(own.get(kind), min(max(rate + pooled - before, 0.0), 1.0))
            rates.append(rate)
        return rates

    def seen(self, kind: int) -> bool:
        """Whether any draft of a kind was counted."""
        return kind in self._all

    def note(self, sequence: int, kind: int, accepted: bool) -> None:
        """A draft was accepted or rejected."""
        own = self._own.setdefault(sequence, {})
        for counts, decay in ((self._all, DECAY), (own, OWN_DECAY)):
            good, drafted = counts.get(kind, (0.0, 0.0))
            counts[kind] = decay * good + accepted, decay * drafted + 1

    def fork(self, sequence: int, child: int) -> None:
        """``child`` begins with the counts of ``sequence``."""
        if sequence in self._own:
            self._own[child] = dict(self._own[sequence])

    def forget(self, sequence: int) -> None:
        """A sequence ended; the counts over all sequences keep its drafts."""
        self._own.pop(sequence, None)


def _posterior(counts: tuple[float, float] | None, prior: float) -> float:
    good, drafted = counts or (0.0, 0.0)
    return (good + PRIOR * prior) / (drafted + PRIOR)
