"""The one object the scheduler asks for memory: blocks, tables and the prefix tree together.

    admit      a new table, on the blocks that already hold a beginning of its tokens
    reserve    the next places can be written: blocks are added, a shared tail is copied; or nothing changes
    commit     they were written: full blocks are published, and blocks behind the window are given back
    fork       a second table on the same blocks
    truncate   the last places are taken back (rejected drafts)
    pack       eviction keeps some places only and moves them together
    release    a table ends; everything a sequence held goes through here

Every block is in one of three places (``stock.py``), and ``check`` adds them up: free (nobody holds it),
cached (only the prefix tree), owned (a table). Idle cached blocks are evicted when there is no free one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from attar.runtime.kv.stock import PrefixCacheStats, Stock
from attar.runtime.kv.table import BlockTable, Packing, blocks_for
from attar.runtime.step import FREED


class BlockManager:
    """Memory of all sequences, which are known by their ids.

    Args:
        capacity: blocks of the pool.
        block_size: B.
        reuse: whether prefixes are shared. Off where a block's content depends on more than its tokens.
        window: places that every layer of the model looks back at most; older blocks are given back.
        sinks: first places that are kept all the same (StreamingLLM); only with ``window``.
        most: places a sequence holds at once, where eviction bounds them; None: as many as it has tokens.
    """

    def __init__(
        self,
        capacity: int,
        block_size: int,
        *,
        reuse: bool = True,
        window: int | None = None,
        sinks: int = 0,
        most: int | None = None,
    ) -> None:
        assert block_size > 0 and (window is None or window > 0) and sinks >= 0
        self.block_size, self.reuse, self.most = block_size, reuse, most
        self.window, self.sinks = window, sinks
        self._stock = Stock(capacity, block_size)
        self._tree = self._stock.tree
        self._asked = self._hit = 0
        self._tables: dict[int, BlockTable] = {}
        self._copies: dict[int, int] = {}  # to -> from, in the order they were asked for

    @property
    def capacity(self) -> int:
        """Blocks of the pool."""
        return self._stock.blocks.capacity

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return self._stock.free

    @property
    def cached(self) -> int:
        """Blocks that only the prefix tree holds."""
        return self._stock.cached

    @property
    def counts(self) -> PrefixCacheStats:
        """What happened since the start."""
        return PrefixCacheStats(self._asked, self._hit, self._stock.evicted * self.block_size)

    @property
    def usage(self) -> float:
        """Share of the pool's blocks that sequences hold, in [0, 1]."""
        return 1 - (self.free + self.cached) / self.capacity

    def fits(self, places: int) -> bool:
        """Whether one sequence of so many places could run if it were alone."""
        return blocks_for(min(places, self.most or places), self.block_size) <= self.capacity

    def matched(self, tokens: Sequence[int], salt: str = "") -> int:
        """Tokens of the prefix that ``admit`` would find; nothing counts as used."""
        return self._tree.depth(tokens[: len(tokens) - 1], salt) * self.block_size if self.reuse else 0

    def admit(
        self, sequence: int, tokens: Sequence[int], salt: str = "", *, reuse: bool = True, spare: int = 0
    ) -> int | None:
        """Begins a table on what is published of ``tokens``.

        Args:
            sequence: an id without a table.
            tokens: of the sequence so far, at least 1.
            salt: the tenant: nothing is shared between salts.
            reuse: False where every token must be run (log-probabilities of the prompt).
            spare: blocks that must be left when all of ``tokens`` have places.

        Returns:
            Tokens whose keys and values are there: whole blocks, and at most len(tokens) - 1, for one token
            must be run to get logits. None, and nothing has changed, where there is no room.
        """
        assert sequence not in self._tables, f"sequence {sequence} has a table"
        found = self._tree.match(tokens[: len(tokens) - 1], salt) if self.reuse and reuse else []
        length = len(found) * self.block_size
        self._tables[sequence] = BlockTable(self.block_size, found, length, salt, published=len(found))
        self._stock.hold(found)
        needed = blocks_for(min(len(tokens), self.most or len(tokens)), self.block_size) - len(found)
        if needed + spare > self.free + self.cached:
            self.release(sequence)
            return None
        self._asked += len(tokens)
        self._hit += length
        return length

    def reserve(self, sequence: int, count: int) -> bool:
        """Makes the next ``count`` places writable. False, and nothing has changed, for want of blocks."""
        table = self._tables[sequence]
        tail = table.tail
        copied = tail is not None and not self._stock.blocks.writable(table.blocks[tail])
        new = self._stock.take(table.missing(count) + copied)
        if new is None:
            return False
        if copied:
            assert tail is not None
            old, copy = table.blocks[tail], new.pop(0)
            table.put(tail, copy)
            self._copies[copy] = old
            self._give_back((old,))
        table.add(new)
        return True

    def commit(self, sequence: int, count: int, tokens: Sequence[int]) -> None:
        """The next ``count`` places were written.

        Args:
            sequence: its id.
            count: places, all reserved.
            tokens: the sequence's tokens that are certain (drafts are not): only their full blocks are
                published.
        """
        table = self._tables[sequence]
        table.length += count
        assert blocks_for(table.length, self.block_size) <= len(table.blocks), (
            "places were written unreserved"
        )
        if self.reuse and not table.sealed:
            self._publish(table, tokens)
        if self.window is not None:
            certain = min(table.length, len(tokens))
            self._give_back(table.punch(self.sinks, certain - self.window))

    def fork(self, sequence: int, child: int) -> None:
        """A second table of the same places; whoever writes first into the shared tail gets a copy of it."""
        assert child not in self._tables, f"sequence {child} has a table"
        self._tables[child] = self._tables[sequence].copy()
        self._stock.hold(self._tables[child].held())

    def truncate(self, sequence: int, length: int) -> None:
        """Keeps places [0, length), and frees the blocks behind."""
        self._give_back(self._tables[sequence].cut(length))

    def pack(self, sequence: int, kept: int) -> Packing | None:
        """Eviction keeps ``kept`` places, packed to [0, kept); nothing of the sequence is published any more.

        Returns:
            What the runner must do at once, or None, and nothing has changed, where blocks for rows that
            may not be overwritten (shared or published) are missing.
        """
        table = self._tables[sequence]
        assert 0 < kept <= table.length, f"{kept} of {table.length} places cannot be kept"
        old, length = table.row, table.length
        count = blocks_for(kept, self.block_size)
        closed = [i for i in range(count) if old[i] == FREED or not self._stock.blocks.writable(old[i])]
        new = self._stock.take(len(closed))
        if new is None:
            return None
        replaced = [old[index] for index in reversed(closed) if old[index] != FREED]
        for index, block in zip(closed, new, strict=True):
            table.put(index, block)
        table.sealed = table.packed = True
        table.published = 0
        self._give_back(table.cut(kept) + replaced)
        return Packing(sequence, old, table.row, kept, length)

    def release(self, sequence: int) -> None:
        """A sequence ended or is preempted: its blocks are free, or stay cached where they are published."""
        self._give_back(self._tables.pop(sequence).held())

    @property
    def sequences(self) -> list[int]:
        """Ids with a table, in the order they came."""
        return list(self._tables)

    def table(self, sequence: int) -> BlockTable:
        """The table of a sequence: to look at."""
        return self._tables[sequence]

    def copies(self) -> tuple[tuple[int, int], ...]:
        """(from, to) blocks to copy before the next step, in order; they are handed out once."""
        copies = tuple((old, new) for new, old in self._copies.items())
        self._copies.clear()
        return copies

    def clear(self) -> int:
        """Empties the prefix tree of what no sequence holds; how many blocks it was."""
        return self._stock.evict(len(self._tree))

    def check(self) -> None:
        """Raises AssertionError naming what is wrong: free + cached + owned must be all blocks."""
        held = [block for table in self._tables.values() for block in table.held()]
        holders = np.bincount(held, minlength=self.capacity).tolist()
        self._stock.check(holders)
        for new in self._copies:
            assert holders[new], f"block {new} waits for a copy that nobody needs"
        for table in self._tables.values():
            table.check()

    def _publish(self, table: BlockTable, tokens: Sequence[int]) -> None:
        """Publishes blocks [published, full); where the tree has the same tokens, its blocks are used."""
        full = min(table.length, len(tokens)) // self.block_size
        if full <= table.published:
            return
        found = self._tree.publish(tokens, table.blocks[:full], table.published, table.salt)
        if found is None:
            table.sealed = True
            return
        for index, block in enumerate(found, table.published):
            own = table.blocks[index]
            if block != own:
                self._stock.hold((block,))
                table.put(index, block)
                self._give_back((own,))
        table.published = full

    def _give_back(self, blocks: Iterable[int]) -> None:
        """The one place where tables let go of blocks; a copy into one that is free now is not made."""
        for block in blocks:
            if self._stock.release(block):
                self._copies.pop(block, None)
