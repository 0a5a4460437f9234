"""A draft model reads a text before it drafts for it: which texts are worth that, and what is charged for it.

    reading = tokens r / t(1)                          plain passes; r seconds a token
    gain    = to come (1 - plain speed / speed)        plain passes that drafts save, as is believed now

A text is read where reading <= gain, or where the purse has all of it: long prompts with short answers are
not, nor anything whose drafts have never been accepted. What was believed worth it is an investment: half a
purse at most is charged, and nothing is learnt from it about the time of a step; so some must be left for
steps behind it. A text that grew by more than BEHIND tokens while nobody asked is read again as far as it
grew.
"""

from __future__ import annotations

from collections.abc import Sequence

from attar.runtime.speculate.choose import Chooser
from attar.runtime.speculate.plan import Chance, Pass

BEHIND = 16
LEFT = 1.0  # plain passes, in the purse after the charge: to draft with, once the text is read


class Reading:
    """How much of each text has been read."""

    def __init__(self) -> None:
        self._read: dict[int, int] = {}

    def worth(self, chooser: Chooser, sequence: int, most: int, tokens: int, to_come: int) -> bool:
        """Whether a model may draft: it has read the text, or should read it.

        Args:
            most: drafts that the sequence may have.
            tokens: of the text so far. to_come: at most.
        """
        plain, new = chooser.cost.plain(1), tokens - self._read.get(sequence, 0)
        if new <= BEHIND or not most or plain <= 0:
            return True
        reading = new * chooser.cost.reading / plain
        gain = to_come * (1 - 1 / (plain * _speed(chooser, sequence, min(most, chooser.most))))
        charged = min(reading, chooser.purse.spare / 2) if reading <= gain else reading
        return chooser.purse.affords(charged + LEFT)

    def meet(self, sequences: Sequence[int], counts: Sequence[int], tokens: Sequence[int]) -> bool:
        """Whether much is read by asking for drafts; all of these texts are read then.

        Args:
            counts: K of each; who gets none is not asked.
            tokens: of each text so far.
        """
        much = False
        for sequence, count, length in zip(sequences, counts, tokens, strict=True):
            if count:
                much |= length - self._read.get(sequence, 0) > BEHIND
                self._read[sequence] = length
        return much

    def charge(self, chooser: Chooser, batch: int, seconds: float) -> None:
        """So long a round took in which texts were read."""
        plain = chooser.cost.plain(batch)
        if plain > 0:
            chooser.purse.note(min(seconds / plain, chooser.purse.spare / 2), 0.0)

    def forget(self, sequence: int) -> None:
        """A sequence ended. Unknown is fine."""
        self._read.pop(sequence, None)


def _speed(chooser: Chooser, sequence: int, most: int) -> float:
    """Tokens a second with the best K, 0 among them."""
    plan, survival = Pass(chooser.cost, 1, 0, True, most), 1.0
    best = plan.speed
    for depth, rate in enumerate(chooser.acceptance.rates(sequence, 0, most), 1):
        survival *= rate
        plan.add(Chance(survival, 0, depth, depth))
        best = max(best, plan.speed)
    return best
