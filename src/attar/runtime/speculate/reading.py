"""A draft model reads a text before it drafts for it: which texts are worth that, and what is charged for it.

    reading = tokens r / t(1)                          plain passes; r seconds a token
    gain    = to come (1 - plain speed / speed)        plain passes that drafts save, as is believed now

A text is read where reading <= gain, or where the budget has all of it: long prompts with short answers are
not, nor anything whose drafts have never been accepted. What was believed worth it is an investment: half a
budget at most is charged, and nothing is learnt from it about the time of a step; so some must be left for
steps behind it. A text that grew by more than BEHIND tokens while nobody asked is read again as far as it
grew.
"""

from __future__ import annotations

from collections.abc import Sequence

from attar.runtime.speculate.policy import DraftPolicy

BEHIND = 16
LEFT = 1.0  # plain passes, in the budget after the charge: to draft with, once the text is read


class DraftPrefill:
    """How much of each text has been read."""

    def __init__(self) -> None:
        self._read: dict[int, int] = {}

    def worth(self, policy: DraftPolicy, sequence: int, most: int, tokens: int, to_come: int) -> bool:
        """Whether a model may draft: it has read the text, or should read it.

        Args:
            most: drafts that the sequence may have.
            tokens: of the text so far. to_come: at most.
        """
        plain, new = policy.latency.target(1, 1), tokens - self._read.get(sequence, 0)
        if new <= BEHIND or not most or plain <= 0:
            return True
        reading = new * policy.latency.reading / plain
        gain = to_come * (1 - 1 / policy.speedup(sequence, most))
        charged = min(reading, policy.budget.size / 2) if reading <= gain else reading
        return policy.budget.open and charged + LEFT <= policy.budget.left

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

    def charge(self, policy: DraftPolicy, batch: int, seconds: float) -> None:
        """So long a round took in which texts were read."""
        plain = policy.latency.target(batch, batch)
        if plain > 0:
            policy.budget.note(min(seconds / plain, policy.budget.size / 2), 0.0)

    def forget(self, sequence: int) -> None:
        """A sequence ended. Unknown is fine."""
        self._read.pop(sequence, None)
