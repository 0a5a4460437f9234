"""The scheduler's one interface to cache memory: blocks, block tables and the prefix tree.

    admit      a new table, starting with the cached blocks of its prefix
    reserve    the next entries become writable: blocks are added, a shared tail is copied; or nothing changes
    commit     they were written: full blocks are published, blocks before the window are released
    fork       a second table on the same blocks
    truncate   the last entries are removed (rejected drafts)
    pack       eviction keeps some entries only and moves them together
    release    a table ends

Every block is in one of three states, and ``check`` adds them up:

    free + cached + owned = all blocks        cached: held by the prefix tree alone, evicted when none is free
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from attar.runtime.kv.blocks import BlockAllocator, BlockTable, Packing, blocks_for
from attar.runtime.kv.prefix_store import PrefixStore
from attar.runtime.kv.prefix_tree import PrefixTree
from attar.runtime.kv.state_snapshots import StateSnapshots
from attar.runtime.step import FREED


@dataclass(frozen=True)
class PrefixCacheStats:
    """Tokens since the start.

    Args:
        queries: of sequences that were admitted.
        hit: of these, served by the prefix cache.
        evicted: dropped from the prefix cache.
    """

    queries: int
    hit: int
    evicted: int


class BlockManager:
    """Cache memory of all sequences, which are known by their ids.

    Args:
        block_size: B.
        reuse: whether prefixes are shared. Off where a block's content depends on more than its tokens.
        window: most entries that any layer looks back; older blocks are released.
        sinks: first entries that are kept all the same (StreamingLLM); only with ``window``.
        most: entries a sequence holds at once, where eviction bounds them; None: as many as it has tokens.
        snapshots: of the states of a model that has them: prefixes are reused up to one; None: no states.

    Attributes:
        store: prefixes on disk; None: in memory alone.
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
        snapshots: StateSnapshots | None = None,
    ) -> None:
        assert block_size > 0 and (window is None or window > 0) and sinks >= 0
        self.block_size, self.reuse, self.most = block_size, reuse, most
        self.window, self.sinks = window, sinks
        self.cached = 0
        self.store: PrefixStore | None = None
        self._blocks = BlockAllocator(capacity)
        self.snapshots = snapshots
        if snapshots is not None:  # of an earlier manager's blocks
            snapshots.clear()
        removed = snapshots.drop if snapshots is not None else lambda block: None
        self._tree = PrefixTree(self._blocks, block_size, removed)
        self._queries = self._hit = self._evicted = 0
        self._tables: dict[int, BlockTable] = {}
        self._copies: dict[int, int] = {}  # to -> from, in the order in which they were requested

    @property
    def capacity(self) -> int:
        """Blocks of the pool."""
        return self._blocks.capacity

    @property
    def free(self) -> int:
        """Blocks without holders."""
        return self._blocks.free

    @property
    def stats(self) -> PrefixCacheStats:
        """Hits and evictions since the start."""
        return PrefixCacheStats(self._queries, self._hit, self._evicted * self.block_size)

    @property
    def usage(self) -> float:
        """Share of the pool's blocks that sequences hold, in [0, 1]."""
        return 1 - (self.free + self.cached) / self.capacity

    @property
    def sequences(self) -> list[int]:
        """Ids with a table, in the order of admission."""
        return list(self._tables)

    def holders(self) -> tuple[list[int], list[int]]:
        """Holders of every block, and the blocks of which the prefix tree is one. For another thread: two
        copies, each consistent, which may be a step apart."""
        return self._blocks.counts(), self._tree.blocks()

    def table(self, sequence: int) -> BlockTable:
        """The table of a sequence; read-only."""
        return self._tables[sequence]

    def fits(self, entries: int) -> bool:
        """Whether one sequence of ``entries`` could run if it were alone."""
        return blocks_for(min(entries, self.most or entries), self.block_size) <= self.capacity

    def matched(self, tokens: Sequence[int], salt: str = "") -> int:
        """Tokens of the prefix that ``admit`` would find; no block counts as used."""
        if not self.reuse:
            return 0
        return len(self._usable(self._tree.peek(tokens[: len(tokens) - 1], salt))) * self.block_size

    def admit(
        self,
        sequence: int,
        tokens: Sequence[int],
        salt: str = "",
        *,
        most_cached: int | None = None,
        spare: int = 0,
    ) -> int | None:
        """Start a table on the published prefix of ``tokens``.

        Args:
            sequence: an id without a table.
            tokens: of the sequence so far, at least 1.
            salt: the tenant: nothing is shared between salts.
            most_cached: the tokens after these must be run (their logits are needed); None: the last alone.
            spare: blocks that must be left when all of ``tokens`` have slots.

        Returns:
            Tokens whose keys and values are cached: whole blocks, and at most len(tokens) - 1, for one token
            must be run to get logits. None, and nothing has changed, where there are too few blocks.
        """
        assert sequence not in self._tables, f"sequence {sequence} has a table"
        end = len(tokens) - 1 if most_cached is None else min(most_cached, len(tokens) - 1)
        prefix = self._usable(self._tree.match(tokens[:end], salt)) if self.reuse else []
        length = len(prefix) * self.block_size
        table = BlockTable(self.block_size, prefix, length, salt, published=len(prefix), given=len(tokens))
        self._tables[sequence] = table
        self._hold(prefix)
        needed = blocks_for(min(len(tokens), self.most or len(tokens)), self.block_size) - len(prefix)
        if needed + spare > self.free + self.cached:
            self.release(sequence)
            return None
        if self.store is not None and self.reuse:
            self._restore(self.store, table, tokens[:end])
        self._queries += len(tokens)
        self._hit += table.length
        if self.snapshots is not None and prefix:
            self.snapshots.start(sequence, prefix[-1])
        return table.length

    def snapshot_positions(self, sequence: int, stop: int, prompt: int) -> tuple[int, ...]:
        """Ends of blocks at which the runner keeps the states of a sequence in the next step, for the prefix
        cache.

        Args:
            stop: end of the certain tokens that the step runs.
            prompt: length of the prompt.
        """
        table = self._tables[sequence]
        if self.snapshots is None or not self.reuse or table.sealed:
            return ()
        return self.snapshots.due(table.published * self.block_size, stop, prompt)

    def _usable(self, prefix: list[int]) -> list[int]:
        """The blocks of a prefix up to the last one with a snapshot, where a model has states."""
        if self.snapshots is None:
            return prefix
        ends = [index for index, block in enumerate(prefix, 1) if block in self.snapshots]
        return prefix[: max(ends, default=0)]

    def reserve(self, sequence: int, count: int) -> bool:
        """Make the next ``count`` entries writable. False, and nothing has changed, for want of blocks."""
        table = self._tables[sequence]
        tail = table.tail
        shared = tail is not None and self._blocks.count(table.blocks[tail]) > 1
        new = self._allocate(table.missing(count) + shared)
        if new is None:
            return False
        if shared:
            assert tail is not None
            old, copy = table.blocks[tail], new.pop(0)
            table.put(tail, copy)
            self._copies[copy] = old
            self._release((old,))
        table.add(new)
        return True

    def commit(self, sequence: int, count: int, tokens: Sequence[int]) -> None:
        """The next ``count`` entries were written.

        Args:
            count: entries, all reserved.
            tokens: the sequence's certain tokens (not drafts): only their full blocks are published.
        """
        table = self._tables[sequence]
        table.length += count
        needed = blocks_for(table.length, self.block_size)
        assert needed <= len(table.blocks), "entries were written unreserved"
        first = table.published
        if self.reuse and not table.sealed:
            self._publish(table, tokens)
        if self.snapshots is not None:
            new = range(first, 0 if table.sealed else table.published)
            ends = {(index + 1) * self.block_size: table.blocks[index] for index in new}
            self.snapshots.publish(sequence, ends)
        if self.window is not None:
            certain = min(table.length, len(tokens))
            self._release(table.free_inside(self.sinks, certain - self.window))

    def fork(self, sequence: int, child: int) -> None:
        """A second table of the same entries; the first to write into the shared tail gets a copy of it."""
        assert child not in self._tables, f"sequence {child} has a table"
        self._tables[child] = self._tables[sequence].copy()
        self._hold(self._tables[child].held())

    def truncate(self, sequence: int, length: int) -> None:
        """Keep entries [0, length), and release the blocks after them."""
        self._release(self._tables[sequence].cut(length))

    def pack(self, sequence: int, kept: int) -> Packing | None:
        """Eviction keeps ``kept`` entries, packed to [0, kept); nothing more of the sequence is published.

        Returns:
            What the runner must do at once, or None, and nothing has changed, where blocks are missing to
            replace blocks that may not be overwritten (shared or published).
        """
        table = self._tables[sequence]
        assert 0 < kept <= table.length, f"{kept} of {table.length} entries cannot be kept"
        old, length = table.row, table.length
        count = blocks_for(kept, self.block_size)
        closed = [i for i in range(count) if old[i] == FREED or self._blocks.count(old[i]) > 1]
        new = self._allocate(len(closed))
        if new is None:
            return None
        replaced = [old[index] for index in reversed(closed) if old[index] != FREED]
        for index, block in zip(closed, new, strict=True):
            table.put(index, block)
        table.sealed = table.packed = True
        table.published = 0
        self._release(table.cut(kept) + replaced)
        return Packing(sequence, old, table.row, kept, length)

    def release(self, sequence: int) -> None:
        """A sequence ended or is preempted: its blocks are free, or stay cached where they are published."""
        if self.snapshots is not None:
            self.snapshots.forget(sequence)
        self._release(self._tables.pop(sequence).held())

    def readable(self, sequence: int) -> tuple[int, ...]:
        """The blocks that hold a sequence's entries now: where a copy is due, its source."""
        row = self._tables[sequence].row
        if not self._copies:
            return row
        sources: dict[int, int] = {}  # a source may be a target too, of an earlier copy or of a later one
        for target, source in self._copies.items():
            sources[target] = sources.get(source, source)
        return tuple(sources.get(block, block) for block in row)

    def copies(self) -> tuple[tuple[int, int], ...]:
        """(from, to) blocks to copy before the next step, in order; each is returned once."""
        copies = tuple((old, new) for new, old in self._copies.items())
        self._copies.clear()
        return copies

    def clear(self) -> int:
        """Evict all cached blocks; returns how many."""
        return self._evict(len(self._tree))

    def check(self) -> None:
        """Raises AssertionError naming what is wrong."""
        held = [block for table in self._tables.values() for block in table.held()]
        holders = np.bincount(held, minlength=self.capacity).tolist()
        self._blocks.check()
        self._tree.check()
        for block, owners in enumerate(holders):
            known, counted = owners + (block in self._tree), self._blocks.count(block)
            assert known == counted, f"block {block} has {known} holders, but counts {counted}"
        owned = sum(1 for owners in holders if owners)
        sizes = f"free {self.free} + cached {self.cached} + owned {owned}"
        assert self.free + self.cached + owned == self.capacity, f"{sizes} are not {self.capacity} blocks"
        for new in self._copies:
            assert holders[new], f"block {new} waits for a copy that no sequence needs"
        for table in self._tables.values():
            table.check()
        orphans = [block for block in self.snapshots or () if block not in self._tree]
        assert not orphans, f"snapshots of blocks {orphans}, which are not in the tree"

    def _publish(self, table: BlockTable, tokens: Sequence[int]) -> None:
        """Publish blocks [published, full); where the tree has the same tokens, its blocks are used."""
        full = min(table.length, len(tokens)) // self.block_size
        if full <= table.published:
            return
        published = self._tree.publish(tokens, table.blocks[:full], table.published, table.salt)
        if published is None:
            table.sealed = True
            return
        for index, block in enumerate(published, table.published):
            held = table.blocks[index]
            if block != held:
                self._hold((block,))
                table.put(index, block)
                self._release((held,))
        table.published = full
        if self.store is not None:
            self._save(self.store, table, tokens)

    def _restore(self, store: PrefixStore, table: BlockTable, tokens: Sequence[int]) -> None:
        """Continue a table that was admitted with the blocks that the store has, and publish them."""
        store.extend(table.keys, tokens, table.salt, self.block_size)
        for index in range(len(table.blocks), len(tokens) // self.block_size):
            new = self._allocate(1) if store.has(table.keys[index]) else None
            if new is None:
                return
            # the source of a copy that is due keeps its content until then
            if new[0] in self._copies.values() or not store.restore(table.keys[index], new[0]):
                self._release(new)
                return
            table.add(new)
            table.length += self.block_size
            published = self._tree.publish(tokens, table.blocks, index, table.salt)
            assert published == new, f"block {new} is in the tree already"
            table.published += 1

    def _save(self, store: PrefixStore, table: BlockTable, tokens: Sequence[int]) -> None:
        """Give the store the published blocks of the tokens that a table was admitted with."""
        count = min(table.published, table.given // self.block_size)
        store.extend(table.keys, tokens[: count * self.block_size], table.salt, self.block_size)
        while table.stored < count and table.blocks[table.stored] != FREED:
            store.save(table.keys[table.stored], table.blocks[table.stored])
            table.stored += 1

    def _allocate(self, count: int) -> list[int] | None:
        """Free blocks, after evicting cached ones where needed; None where there are too few."""
        if count > self.free:
            self._evict(count - self.free)
        return [self._blocks.allocate() for _ in range(count)] if count <= self.free else None

    def _hold(self, blocks: Iterable[int]) -> None:
        """A table holds these blocks."""
        for block in blocks:
            if self._blocks.count(block) == 1 and block in self._tree:
                self.cached -= 1
            self._blocks.hold(block)

    def _release(self, blocks: Iterable[int]) -> None:
        """A table releases these blocks; a pending copy into one that is free now is dropped."""
        for block in blocks:
            left = self._blocks.release(block)
            if left == 1 and block in self._tree:
                self.cached += 1
                self._tree.note_idle(block)
            if left == 0:
                self._copies.pop(block, None)

    def _evict(self, count: int) -> int:
        """Evict up to ``count`` cached blocks, least recently used first; returns how many."""
        evicted = self._tree.evict(count)
        self.cached -= evicted
        self._evicted += evicted
        return evicted
