"""Block tables of a draft model: what it has run of each sequence.

    begin    a round of sequences, the first ones have priority
    open     truncate to what table and sequence have in common (rejected drafts), reserve slots for the rest
    ran      tokens were run
    drop

A table may be dropped whenever slots are short, and is computed again. Those that are not in the round go
first, least recently used before the others; then those at the round's end. So a pool that is too small for a
batch serves its first sequences every time, and does not evict all in turn. Published blocks of a dropped
table stay until they are needed, and are found again by their prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.step import TokenSpan

NEAR = 64  # tokens at the end, where sequence and table usually differ


class DraftTables:
    """The tables of a draft model.

    Args:
        manager: of its pool; without a sliding window, for tables are truncated to any length.
        forget: called with every sequence whose table is dropped.
    """

    def __init__(self, manager: BlockManager, forget: Callable[[int], None]) -> None:
        self.manager, self._forget = manager, forget
        self._ran: dict[int, list[int]] = {}  # tokens in each table, the least recently used first
        self._round: list[int] = []

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._ran

    def length(self, sequence: int) -> int:
        """Tokens that were run."""
        return len(self._ran[sequence])

    def begin(self, sequences: Sequence[int]) -> None:
        """A round of these; none of them loses its table to a later one."""
        self._round = list(sequences)

    def open(self, sequence: int, tokens: Sequence[int], ahead: int, salt: str = "") -> bool:
        """Reserves slots for the new tokens of a sequence. Returns false where there is no room; the
        sequence then has an older table, or none.

        Args:
            tokens: all of it, at least one; the last is always run again, for its logits.
            ahead: slots after the tokens that drafts will need.
            salt: the tenant.
        """
        self._truncate(sequence, tokens)
        while not self._reserved(sequence, tokens, ahead, salt):
            victim = self._victim(sequence)
            if victim is None:
                return False
            self.drop(victim)
        self._ran[sequence] = self._ran.pop(sequence)
        return True

    def span(self, sequence: int, count: int, logits: int) -> TokenSpan:
        """The next ``count`` tokens of an open sequence, the last ``logits`` of them with logits."""
        start = len(self._ran[sequence])
        return TokenSpan(sequence, start, start + count, self.manager.table(sequence).row, logits)

    def ran(self, sequence: int, tokens: Sequence[int], certain: Sequence[int]) -> None:
        """The next tokens were run; full blocks of ``certain`` tokens, no draft among them, are published."""
        self._ran[sequence] += tokens
        self.manager.commit(sequence, len(tokens), certain)

    def drop(self, sequence: int) -> None:
        """Releases a table."""
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
            assert length == len(tokens), f"sequence {sequence}: {length} slots for {len(tokens)} tokens"

    def _truncate(self, sequence: int, tokens: Sequence[int]) -> None:
        """Takes back what is not of the sequence, and its last token."""
        ran = self._ran.get(sequence)
        if ran is None:
            return
        length = min(common_prefix(ran, tokens), len(tokens) - 1)
        if length < len(ran):
            self.manager.truncate(sequence, length)
            del ran[length:]

    def _reserved(self, sequence: int, tokens: Sequence[int], ahead: int, salt: str) -> bool:
        """Whether there are slots for all of it; a table is begun where the tokens fit."""
        if sequence not in self._ran:
            spare = len(self._round) - 1  # others grow too, and would take them
            reused = self.manager.admit(sequence, tokens, salt, spare=spare)
            if reused is None:
                return False
            self._ran[sequence] = list(tokens[:reused])
        return self.manager.reserve(sequence, len(tokens) + ahead - len(self._ran[sequence]))

    def _victim(self, sequence: int) -> int | None:
        idle = next((other for other in self._ran if other not in self._round), None)
        if idle is not None:
            return idle
        later = self._round[self._round.index(sequence) + 1 :]
        return next((other for other in reversed(later) if other in self._ran), None)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens at the beginning that are equal."""
    count = min(len(first), len(second))
    near = max(count - NEAR, 0)
    start = near if first[:near] == second[:near] else 0
    return next((index for index in range(start, count) if first[index] != second[index]), count)
