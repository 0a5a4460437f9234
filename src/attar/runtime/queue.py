"""Waiting sequences, and who starts first.

By priority; inside one, those that were preempted, then by arrival. With ``prefix_first`` the longest
published prefix goes before the earlier arrival, so that what is cached is used before it is evicted;
whoever waited longer than the patience goes first all the same, so nobody is overtaken for ever.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from attar.runtime.admission import Limits
from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.sequence import Sequence


class WaitingQueue:
    """Sequences without blocks.

    Args:
        manager: asked for published prefixes.
        limits: ``prefix_first`` and ``patience_s``.
    """

    def __init__(self, manager: BlockManager, limits: Limits) -> None:
        self._manager, self._limits = manager, limits
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """By priority, preempted ones first, then by arrival."""
        return iter(self._sequences)

    @property
    def prompts(self) -> int:
        """Tokens of the prompts."""
        return sum(sequence.prompt for sequence in self._sequences)

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_place)

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)

    def ordered(self, now: float) -> list[Sequence]:
        """All of them, first to start first.

        Args:
            now: seconds on the clock of the arrivals.
        """
        if not self._limits.prefix_first:
            return list(self._sequences)
        return sorted(self._sequences, key=lambda sequence: self._eager(sequence, now))

    def check(self) -> None:
        """Raises AssertionError naming what is wrong."""
        assert self._sequences == sorted(self._sequences, key=_place), "waiting sequences are out of order"

    def _eager(self, sequence: Sequence, now: float) -> tuple[int, bool, bool, int, tuple[int, float, int]]:
        request, matched = sequence.request, 0
        patient = now - request.arrival < self._limits.patience_s
        if patient and not request.prompt_logits:
            matched = self._manager.matched(sequence.tokens, request.salt)
        return (request.priority, not sequence.preempted, patient, -matched, sequence.order)


def _place(sequence: Sequence) -> tuple[int, bool, tuple[int, float, int]]:
    return (sequence.request.priority, not sequence.preempted, sequence.order)
