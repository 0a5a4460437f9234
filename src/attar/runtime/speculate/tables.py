"""What a draft model has run of each sequence: block tables of its own, that follow the target's text.

    begin    a round of sequences, the first ones first served
    open     back to where table and text part (rejected drafts), then places for what is still to be run
    ran      it was run
    fork, drop

A table is not part of the text: it may go whenever places are short, and is computed again. Those that are
not in the round go first, the one longest out of use before the others; then those at the round's end. So a
pool that is too small for a batch serves its first sequences every time, and never takes from all in turn.
What is published of a dropped table stays until its blocks are needed, and is found again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.step import TokenSpan

NEAR = 64  # tokens at the end, where text and table usually part


class DraftTables:
    """The tables of a draft model.

    Args:
        manager: of its pool; without a window, for places are taken back to any depth.
        forget: called with every sequence whose table goes.
    """

    def __init__(self, manager: BlockManager, forget: Callable[[int], None]) -> None:
        self.manager, self._forget = manager, forget
        self._ran: dict[int, list[int]] = {}  # what is in the table; the longest out of use first
        self._round: list[int] = []

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._ran

    def length(self, sequence: int) -> int:
        """Tokens that were run."""
        return len(self._ran[sequence])

    def begin(self, sequences: Sequence[int]) -> None:
        """A round of these; none of them loses its table to one behind it."""
        self._round = list(sequences)

    def open(self, sequence: int, tokens: Sequence[int], ahead: int, salt: str = "") -> bool:
        """Makes ready to run what is new of a text.

        Args:
            sequence: of the round.
            tokens: its text, at least one; the last is always run again, for its logits.
            ahead: places behind the text that drafts will need.
            salt: the tenant.

        Returns:
            False where there is no room; the sequence then has an older table, or none.
        """
        self._back(sequence, tokens)
        while not self._placed(sequence, tokens, ahead, salt):
            victim = self._victim(sequence)
            if victim is None:
                return False
            self.drop(victim)
        self._ran[sequence] = self._ran.pop(sequence)
        return True

    def span(self, sequence: int, count: int, wants: int) -> TokenSpan:
        """The next ``count`` tokens of a sequence that is open."""
        start = len(self._ran[sequence])
        return TokenSpan(sequence, start, start + count, self.manager.table(sequence).row, wants)

    def ran(self, sequence: int, tokens: Sequence[int], certain: Sequence[int]) -> None:
        """The next tokens were run; of what is ``certain`` whole blocks are published."""
        self._ran[sequence] += tokens
        self.manager.commit(sequence, len(tokens), certain)

    def fork(self, sequence: int, child: int) -> None:
        """A second table on the same blocks."""
        self.manager.fork(sequence, child)
        self._ran[child] = self._ran[sequence].copy()

    def drop(self, sequence: int) -> None:
        """A table goes."""
        del self._ran[sequence]
        self.manager.release(sequence)
        self._forget(sequence)

    def check(self) -> None:
        """Raises AssertionError naming what is wrong."""
        self.manager.check()
        known, held = sorted(self._ran), sorted(self.manager.sequences)
        assert known == held, f"tables of {held}, but {known} are known"
        for sequence, tokens in self._ran.items():
            length = self.manager.table(sequence).length
            assert length == len(tokens), f"sequence {sequence}: {length} places for {len(tokens)} tokens"

    def _back(self, sequence: int, tokens: Sequence[int]) -> None:
        """Takes back what is not of the text, and its last token."""
        ran = self._ran.get(sequence)
        if ran is None:
            return
        length = min(common(ran, tokens), len(tokens) - 1)
        if length < len(ran):
            self.manager.truncate(sequence, length)
            del ran[length:]

    def _placed(self, sequence: int, tokens: Sequence[int], ahead: int, salt: str) -> bool:
        """Whether there are places for all of it; a table is begun where there is room for the text."""
        if sequence not in self._ran:
            spare = len(self._round) - 1  # others grow too, and would take it away again
            found = self.manager.admit(sequence, tokens, salt, spare=spare)
            if found is None:
                return False
            self._ran[sequence] = list(tokens[:found])
        return self.manager.reserve(sequence, len(tokens) + ahead - len(self._ran[sequence]))

    def _victim(self, sequence: int) -> int | None:
        idle = next((each for each in self._ran if each not in self._round), None)
        if idle is not None:
            return idle
        behind = self._round[self._round.index(sequence) + 1 :]
        return next((each for each in reversed(behind) if each in self._ran), None)


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens at the beginning that are equal."""
    count = min(len(first), len(second))
    near = max(count - NEAR, 0)
    start = near if first[:near] == second[:near] else 0
    return next((place for place in range(start, count) if first[place] != second[place]), count)
