"""How likely a draft is accepted, given that the one before it was: a running estimate by kind.

    a = (s + M b) / (c + M)      s of c drafts accepted, both forgetting: times DECAY with every draft seen
    b                            what is believed without them: of the kind before, moved as the pool says

Drafts are counted under kinds. A kind is a group and a level in it: ``group * LEVELS + level``, levels from
1. For a chain of a draft model the level is the depth; for n-grams how many tokens matched before. So a's
change with the level is learnt, not assumed. A pool over all requests gives a new one its first belief; the
request's own drafts then move it (an exponential form of a Beta prior of M drafts).

Only drafts whose parent was accepted are seen; those behind a rejection say nothing.
"""

from __future__ import annotations

LEVELS = 32
FIRST = 0.6  # believed of a kind's first level before anything was seen
POOL, OWN = 8.0, 4.0  # M: drafts that the belief is worth
POOL_DECAY, OWN_DECAY = 0.99, 0.97

Counts = dict[int, tuple[float, float]]  # kind: accepted, seen


class Acceptance:
    """Estimates of all sequences."""

    def __init__(self) -> None:
        self._pool: Counts = {}
        self._own: dict[int, Counts] = {}
        self._known: dict[tuple[int, int, int, float], list[float]] = {}  # rates, until something changes

    def rates(
        self, sequence: int, group: int = 0, levels: int = LEVELS - 1, first: float = FIRST
    ) -> list[float]:
        """a of levels 1..``levels`` of a group, not to be changed; ``first`` is believed of the unseen."""
        asked = sequence, group, levels, first
        if asked not in self._known:
            self._known[asked] = self._rates(*asked)
        return self._known[asked]

    def seen(self, kind: int) -> float:
        """Drafts of a kind in memory."""
        return self._pool.get(kind, (0.0, 0.0))[1]

    def note(self, sequence: int, kind: int, accepted: bool) -> None:
        """A draft was accepted, or was the first rejected."""
        self._known.clear()
        own = self._own.setdefault(sequence, {})
        for counts, decay in ((self._pool, POOL_DECAY), (own, OWN_DECAY)):
            good, count = counts.get(kind, (0.0, 0.0))
            counts[kind] = (decay * good + accepted, decay * count + 1)

    def fork(self, sequence: int, child: int) -> None:
        """``child`` begins with what is believed of ``sequence``."""
        self._known.clear()
        if sequence in self._own:
            self._own[child] = dict(self._own[sequence])

    def forget(self, sequence: int) -> None:
        """A sequence ended; the pool keeps what it taught."""
        self._known.clear()
        self._own.pop(sequence, None)

    def _rates(self, sequence: int, group: int, levels: int, first: float) -> list[float]:
        own = self._own.get(sequence, {})
        found: list[float] = []
        pooled = mine = first
        for kind in range(kind_of(group, 1), kind_of(group, levels) + 1 if levels else 0):
            before, pooled = pooled, _mixed(self._pool.get(kind), POOL, pooled)
            mine = _mixed(own.get(kind), OWN, min(max(mine + pooled - before, 0.0), 1.0))
            found.append(mine)
        return found + found[-1:] * (levels - len(found))


def kind_of(group: int, level: int) -> int:
    """The kind of a level; levels beyond the last are one."""
    return group * LEVELS + min(level, LEVELS - 1)


def _mixed(counts: tuple[float, float] | None, strength: float, belief: float) -> float:
    if counts is None:
        return belief
    return (counts[0] + strength * belief) / (counts[1] + strength)
