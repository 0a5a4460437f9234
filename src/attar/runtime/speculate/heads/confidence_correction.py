"""How sure a head is of its tokens, corrected by how often they were accepted where it serves.

    c_l    (accepted + PRIOR c') / (expected + PRIOR)     at depth l, of drafts whose parent was accepted

``expected`` is the sum of the chances that the head gave them. c' is 1 over all sequences, and for one
sequence what it is over all. All counts decay with every chain, so that a depth which is not reached any more
is tried again; weights and decays are those of the acceptance rates (``acceptance.py``). A head that was
calibrated on one kind of text is too sure, or too modest, on another: what it drafts beyond the tokens that
are accepted costs time. A round is decided with the c of the rounds before it, so that exact verification
keeps the target's distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from attar.runtime.speculate.acceptance import DECAY, NEVER, OWN_DECAY, OWN_PRIOR, PRIOR

Counts = dict[int, tuple[float, float]]  # depth: accepted, expected


class ConfidenceCorrection:
    """Factors for the chances that a head gives its tokens, by depth."""

    def __init__(self) -> None:
        self._all: Counts = {}
        self._own: dict[int, Counts] = {}  # by sequence

    def factors(self, sequence: int, depths: int) -> list[float]:
        """c of depths 1..``depths``."""
        sequence_counts, factors = self._own.get(sequence, {}), list[float]()
        for depth in range(1, depths + 1):
            accepted, expected = self._all.get(depth, NEVER)
            pooled = (accepted + PRIOR) / (expected + PRIOR)
            accepted, expected = sequence_counts.get(depth, NEVER)
            factors.append((accepted + OWN_PRIOR * pooled) / (expected + OWN_PRIOR))
        return factors

    def note(
        self, sequence: int, drafted: Sequence[int], chances: Sequence[float], tokens: Sequence[int]
    ) -> None:
        """Count the drafts of a chain up to the first that is not accepted.

        Args:
            chances: of each draft, as the head gave them; those from one that is not a number on are not
                counted: the counts are shared by all sequences.
            tokens: that were decided: no draft behind them can be judged.
        """
        sequence_counts = self._own.setdefault(sequence, {})
        for counts, decay in ((self._all, DECAY), (sequence_counts, OWN_DECAY)):
            for depth, (accepted, expected) in counts.items():
                counts[depth] = decay * accepted, decay * expected
            for depth, (draft, chance, token) in enumerate(zip(drafted, chances, tokens, strict=False), 1):
                if math.isnan(chance):
                    break
                accepted, expected = counts.get(depth, NEVER)
                counts[depth] = accepted + (draft == token), expected + chance
                if draft != token:
                    break

    def forget(self, sequence: int) -> None:
        """A sequence ended."""
        self._own.pop(sequence, None)
