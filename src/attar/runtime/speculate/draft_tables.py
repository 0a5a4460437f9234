"""Block tables of a draft model: the tokens it has run of each sequence.

    begin    start a round; its first sequences have priority
    open     truncate the table to its common prefix with the sequence (rejected drafts), reserve new slots
    ran      count tokens that were run
    drop     release a table

Tables are dropped when slots run out, and computed again later: first those outside the round, the least
recently used first, then those at the end of the round. So a pool that is too small for the batch always
serves the same first sequences. Published blocks of a dropped table stay in the prefix cache until they are
needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.step import TokenSpan

NEAR = 64  # last tokens, which are compared one by one


class DraftTables:
    """The tables of a draft model.

    Args:
        manager: of its pool; without a sliding window, as tables are truncated to any length.
        forget: called for every sequence whose table is dropped.
    """

    def __init__(self, manager: BlockManager, forget: Callable[[int], None]) -> None:
        self.manager, self._forget = manager, forget
        self._ran: dict[int, list[int]] = {}  # tokens in each table, the least recently used first
        self._round: list[int] = []

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._ran

    def length(self, sequence: int) -> int:
        """Tokens of the sequence that were run."""
        return len(self._ran[sequence])

    def begin(self, sequences: Sequence[int]) -> None:
        """Start a round; none of these sequences loses its table to a later one."""
        self._round = list(sequences)

    def open(self, sequence: int, tokens: Sequence[int], ahead: int, salt: str = "") -> bool:
        """Reserve slots for the new tokens of a sequence of the round; false if they do not suffice: the
        sequence then keeps an older table, or has none.

        Args:
            tokens: the whole sequence, at least one; the last is always run again, for its logits.
            ahead: further slots, for drafts.
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

    def span(self, sequence: int, count: int, logits: int, certain: int) -> TokenSpan:
        """The next ``count`` tokens of an open sequence, the last ``logits`` of them with logits.

        Args:
            certain: tokens of the sequence that are never run again.
        """
        start = len(self._ran[sequence])
        stop, row = start + count, self.manager.table(sequence).row
        return TokenSpan(sequence, start, stop, row, logits, drafts=max(stop - certain, 0))

    def ran(self, sequence: int, tokens: Sequence[int], certain: Sequence[int]) -> None:
        """Count tokens that were run; full blocks of ``certain`` tokens (no drafts) are published."""
        self._ran[sequence] += tokens
        self.manager.commit(sequence, len(tokens), certain)

    def drop(self, sequence: int) -> None:
        """Release a table."""
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
        """Release the slots beyond the common prefix, and that of the last token."""
        ran = self._ran.get(sequence)
        if ran is None:
            return
        length = min(common_prefix(ran, tokens), len(tokens) - 1)
        if length < len(ran):
            self.manager.truncate(sequence, length)
            del ran[length:]

    def _reserved(self, sequence: int, tokens: Sequence[int], ahead: int, salt: str) -> bool:
        """Whether all slots are reserved; a missing table is allocated if the tokens fit."""
        if sequence not in self._ran:
            spare = len(self._round) - 1  # one block for each other sequence, which grows too
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
    """Length of the common prefix."""
    count = min(len(first), len(second))
    near = max(count - NEAR, 0)
    start = near if first[:near] == second[:near] else 0
    return next((index for index in range(start, count) if first[index] != second[index]), count)
