"""How far a drafter drafts for a sequence: on and on while its drafts are used, else a token now and then.

    unused      tokens that were committed since a draft was accepted
    gap         tokens between two questions, once PATIENCE are unused
    question    asks for one token: what is committed in its place says whether it was right
    answer      of use (right, and drafts pay): gap // 2; of none: min(2 gap + 1, MOST_GAP); gap 0: drafts on

So a drafter that is of no use drafts one token in MOST_GAP + 1, and one whose guesses become right drafts on
after a few questions, each sooner than the one before. Pure.
"""

from __future__ import annotations

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
