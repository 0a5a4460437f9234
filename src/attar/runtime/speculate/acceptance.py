"""How likely drafts are accepted, as counted: over all sequences, and for each.

a_l    (accepted + PRIOR a') / (drafted + PRIOR)      at level l; counts decay, a' is the prior rate
a'     of level l: the rate of level l - 1; for one sequence plus the pooled rates' step from l - 1 to l
"""

from __future__ import annotations

from collections.abc import Mapping

from attar.runtime.speculate.draft import kind_of, kinds_of
from attar.runtime.speculate.proposer import DraftFeedback

FIRST = 0.6  # a' of a group that was never drafted
PRIOR, OWN_PRIOR = 8.0, 4.0  # weight of a', in drafts: over all sequences, of one sequence
DECAY, OWN_DECAY = 0.99, 0.97  # of the counts with every draft: over all sequences, of one sequence
NEVER = 0.0, 0.0  # counts of a kind that was not drafted
NONE: Mapping[int, tuple[float, float]] = {}


class AcceptanceRates:
    """Probability that a draft is accepted if its parent was, by kind: a group and a level (``draft.py``)."""

    def __init__(self) -> None:
        self._all: dict[int, tuple[float, float]] = {}  # kind: accepted, drafted
        self._own: dict[int, dict[int, tuple[float, float]]] = {}  # by sequence

    def rates(self, sequence: int, group: int, levels: int, first: float = FIRST) -> list[float]:
        """a of levels 1..``levels`` of a group."""
        everyone, counts, rates = self._all, self._own.get(sequence, NONE), list[float]()
        pooled = rate = first
        for level in range(1, levels + 1):
            kind = kind_of(group, level)
            good, drafted = everyone.get(kind, NEVER)
            before, pooled = pooled, (good + PRIOR * pooled) / (drafted + PRIOR)
            good, drafted = counts.get(kind, NEVER)
            rate = min(max(rate + pooled - before, 0.0), 1.0)
            rate = (good + OWN_PRIOR * rate) / (drafted + OWN_PRIOR)
            rates.append(rate)
        return rates

    def seen(self, kind: int) -> bool:
        return kind in self._all

    def note(self, sequence: int, kind: int, accepted: bool) -> None:
        """Count a draft whose parent was accepted."""
        for counts, decay in ((self._all, DECAY), (self._own.setdefault(sequence, {}), OWN_DECAY)):
            good, drafted = counts.get(kind, NEVER)
            counts[kind] = decay * good + accepted, decay * drafted + 1

    def learn(self, feedback: DraftFeedback) -> None:
        """Count every draft whose parent was accepted, and that which a confident proposer did not draft as
        rejected: depths are chosen before."""
        draft, accepted = feedback.draft, {0, *feedback.path}
        drafts = feedback.stopped_by_confidence
        if drafts is not None and feedback.path[:drafts] == tuple(range(1, drafts + 1)):
            self.note(feedback.sequence, kind_of(0, drafts + 1), False)
        if draft is not None:
            for node, (parent, kind) in enumerate(zip(draft.parents, kinds_of(draft), strict=True), 1):
                if parent in accepted:
                    self.note(feedback.sequence, kind, node in accepted)

    def forget(self, sequence: int) -> None:
        self._own.pop(sequence, None)
