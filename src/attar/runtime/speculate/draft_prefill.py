"""Which sequences a draft model prefills.

    prefill = min(tokens, window) r / t(1)                 plain passes; r seconds a token of the draft model
    gain    = remaining tokens (1 - plain speed / speed)   plain passes that drafts are expected to save

A draft model prefills a sequence before it drafts for it, if prefill <= gain, or if the budget covers all of
it; so not long prompts with short completions, nor sequences whose drafts are never accepted. At most half
the budget is charged, which leaves the rest for drafts, and its time is not counted as that of a draft step.
The new tokens of a sequence that grew by more than CATCH_UP tokens without drafts are prefilled again.
"""

from __future__ import annotations

from collections.abc import Sequence

from attar.runtime.speculate.policy import DraftPolicy

CATCH_UP = 16  # tokens without drafts, after which a sequence is prefilled again
RESERVE = 1.0  # plain passes that remain in the budget after the charge, for drafts


class DraftPrefill:
    """How many tokens of each sequence the draft model has run."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}

    def pays(self, policy: DraftPolicy, sequence: int, most: int, tokens: int, remaining: int) -> bool:
        """Whether to draft for a sequence: it is prefilled, or prefilling it pays.

        Args:
            most: limit of its drafts.
            tokens: of the sequence so far.
            remaining: tokens that it may still get.
        """
        plain, new = policy.latency.target(1, 1), tokens - self._lengths.get(sequence, 0)
        if new <= CATCH_UP or not most or plain <= 0:
            return True
        prefill, budget = policy.latency.read(new) / plain, policy.budget
        charged = min(prefill, budget.size / 2)
        if not budget.open or charged + RESERVE > budget.left:
            return False
        if prefill + RESERVE <= budget.left:
            return True
        return prefill <= remaining * (1 - 1 / policy.speedup(sequence, most))

    def begin(self, sequences: Sequence[int], counts: Sequence[int], tokens: Sequence[int]) -> bool:
        """Whether drafting K = ``counts`` tokens prefills any of the sequences; those with K > 0 then count
        as prefilled up to their length in ``tokens``."""
        prefills = False
        for sequence, count, length in zip(sequences, counts, tokens, strict=True):
            if count:
                prefills |= length - self._lengths.get(sequence, 0) > CATCH_UP
                self._lengths[sequence] = length
        return prefills

    def charge(self, policy: DraftPolicy, batch: int, seconds: float) -> None:
        """Charge the seconds of a proposal with prefill."""
        plain = policy.latency.target(batch, batch)
        if plain > 0:
            policy.budget.note(min(seconds / plain, policy.budget.size / 2), 0.0)

    def forget(self, sequence: int) -> None:
        """A sequence ended; unknown ids are ignored."""
        self._lengths.pop(sequence, None)
