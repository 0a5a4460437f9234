"""Reference counts of the pool's blocks, and the block table of a sequence, with copy-on-write.

Letters: B slots of a block. Entry i of a sequence's cache (the keys and values of one token) is in block
``blocks[i // B]``. A table covers the entries

    [0, length)             hold keys and values
    [length, len(blocks) B) reserved: the next step writes them, nothing reads them

A block is held by block tables and by the prefix tree, one reference each, and is free without holders. Only
a single holder may write a block: shared and published blocks are read-only without further flags. Only the
block around ``length`` can be both shared and about to be written (full blocks do not change), so a write
needs at most one copy.

Source: vLLM 0.6.1 (``core/block``). Differs: the prefix tree is a holder like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from attar.runtime.step import FREED


def blocks_for(entries: int, block_size: int) -> int:
    """Blocks that hold ``entries`` cache entries."""
    return -(-entries // block_size)


class BlockAllocator:
    """Reference counts of ``capacity`` blocks, numbered from 0.

    Free blocks are allocated last in, first out: the block used last is still in the processor's caches.

    Args:
        capacity: blocks of the pool, at least 1.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, f"a pool has at least one block, not {capacity}"
        self.capacity = capacity
        self._counts = [0] * capacity
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def free(self) -> int:
        """Blocks without holders."""
        return len(self._free)

    def count(self, block: int) -> int:
        """Holders of a block."""
        return self._counts[block]

    def counts(self) -> list[int]:
        """Holders of every block; a copy."""
        return self._counts.copy()

    def allocate(self) -> int:
        """A free block, now with one holder. There must be one."""
        block = self._free.pop()
        self._counts[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more holder of a block that is not free."""
        assert self._counts[block] > 0, f"block {block} is free and cannot be shared"
        self._counts[block] += 1

    def release(self, block: int) -> int:
        """One holder less; the holders left. At 0 the block is free."""
        assert self._counts[block] > 0, f"block {block} is released twice"
        self._counts[block] -= 1
        if self._counts[block] == 0:
            self._free.append(block)
        return self._counts[block]

    def check(self) -> None:
        """Raises AssertionError naming blocks whose count disagrees with the free list."""
        listed = sorted(self._free)
        assert len(set(listed)) == len(listed), f"a block is free twice: {listed}"
        unheld = [block for block, count in enumerate(self._counts) if count == 0]
        assert unheld == listed, f"blocks without holders {unheld} are not the free ones {listed}"
        assert min(self._counts) >= 0, "a block has a negative count"


@dataclass(frozen=True)
class Packing:
    """What a runner does when eviction packs a sequence: entries that are kept move from ``old`` to ``new``.

    Both are block tables; ``new`` covers entries [0, kept). A block may be in both: entries are read before
    any is written. It happens before anything else is scheduled, for ``old`` is released already.

    Args:
        length: entries of ``old`` that hold keys and values; a runner may have written more, of rejected
            drafts.
    """

    sequence: int
    old: tuple[int, ...]
    new: tuple[int, ...]
    kept: int
    length: int


@dataclass
class BlockTable:
    """One sequence's blocks.

    Args:
        block_size: B.
        blocks: in the order of the entries; FREED where a block was released early.
        length: entries that hold keys and values.
        salt: namespace of the prefix tree.
        published: leading blocks that are in the prefix tree, or need not be published any more.
        sealed: nothing more is published: the chain to the root is broken, or eviction packed the cache.
        packed: entries are no longer in the order of positions, and some are missing.
        swept: index of the first block that ``free_inside`` has not examined.
        given: tokens that it was admitted with: their blocks go to the prefix store.
        keys: of the first blocks, in the prefix store.
        stored: leading blocks that the prefix store was given.
    """

    block_size: int
    blocks: list[int] = field(default_factory=list)
    length: int = 0
    salt: str = ""
    published: int = 0
    sealed: bool = False
    packed: bool = False
    swept: int = 0
    given: int = 0
    keys: list[str] = field(default_factory=list)
    stored: int = 0
    _row: tuple[int, ...] | None = field(default=None, repr=False)

    @property
    def row(self) -> tuple[int, ...]:
        """The blocks as a tuple, for steps; the same object until one of them changes."""
        if self._row is None:
            self._row = tuple(self.blocks)
        return self._row

    def add(self, blocks: Sequence[int]) -> None:
        """Append blocks."""
        if blocks:
            self.blocks += blocks
            self._row = None

    def put(self, index: int, block: int) -> None:
        """Replace the block at an index."""
        self.blocks[index] = block
        self._row = None

    @property
    def tail(self) -> int | None:
        """Index of the partly filled block, which is written next and may be shared."""
        return self.length // self.block_size if self.length % self.block_size else None

    def slot(self, entry: int) -> int:
        """Slot of an entry in the pool; its block is not freed."""
        return self.blocks[entry // self.block_size] * self.block_size + entry % self.block_size

    def missing(self, count: int) -> int:
        """Blocks to add before ``count`` more entries can be written."""
        return max(blocks_for(self.length + count, self.block_size) - len(self.blocks), 0)

    def held(self) -> Iterator[int]:
        """The blocks, last first, so that the end of a chain becomes evictable before its beginning."""
        return (block for block in reversed(self.blocks) if block != FREED)

    def copy(self) -> BlockTable:
        """The same entries in the same blocks, without reserved blocks."""
        used = self.blocks[: blocks_for(self.length, self.block_size)]
        return BlockTable(
            self.block_size,
            used,
            self.length,
            self.salt,
            min(self.published, len(used)),
            self.sealed,
            self.packed,
            min(self.swept, len(used)),
        )

    def cut(self, length: int) -> list[int]:
        """Keep entries [0, length); the caller releases the returned blocks after them, last first."""
        assert 0 <= length <= self.length, f"entries [0, {self.length}) cannot be cut to {length}"
        keep = blocks_for(length, self.block_size)
        released = [block for block in reversed(self.blocks[keep:]) if block != FREED]
        del self.blocks[keep:]
        self._row = None
        self.length = length
        self.published = min(self.published, length // self.block_size)
        self.swept = min(self.swept, keep)
        return released

    def free_inside(self, start: int, stop: int) -> list[int]:
        """Mark whole blocks inside entries [start, stop) as FREED; the caller releases the returned blocks.

        ``start`` is the same in every call; blocks that were examined before are skipped.
        """
        stop = min(stop, self.length)
        first, last = max(blocks_for(start, self.block_size), self.swept), stop // self.block_size
        indices = [index for index in range(first, last) if self.blocks[index] != FREED]
        released = [self.blocks[index] for index in reversed(indices)]
        for index in indices:
            self.put(index, FREED)
        self.swept = max(self.swept, last)
        return released

    def check(self) -> None:
        """Raises AssertionError naming what is inconsistent."""
        needed = blocks_for(self.length, self.block_size)
        assert len(self.blocks) >= needed, f"{len(self.blocks)} blocks for {self.length} entries"
        assert self.published * self.block_size <= self.length, "a block was published before it was full"
        held = list(self.held())
        assert len(set(held)) == len(held), f"a table holds a block twice: {self.blocks}"
        assert self._row in (None, tuple(self.blocks)), "the cached row is out of date"
        writable = self.tail is None or self.blocks[self.tail] != FREED
        assert writable, "the block that is written next was freed"
