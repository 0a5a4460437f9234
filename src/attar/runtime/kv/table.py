"""Block tables: which blocks hold a sequence's places, with copy-on-write.

Letters: B places in a block. A table covers the places

    [0, length)             hold keys and values
    [length, len(blocks) B) reserved: the step that is being made writes them, nobody reads them

A block with other holders is read-only. Only the block around ``length`` can be both shared and about to be
written (full blocks stay as they are), so a write needs at most one copy.

Source: vLLM 0.6.1 (``core/block/common.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from attar.runtime.step import FREED


def blocks_for(places: int, block_size: int) -> int:
    """Blocks that hold so many places."""
    return -(-places // block_size)


@dataclass(frozen=True)
class Packing:
    """What a runner does when eviction packs a sequence: rows that are kept move from ``old`` to ``new``.

    Both are block tables; ``new`` covers places [0, kept). A block may stand in both: rows are read before
    any is written. It is done before anything else is scheduled, for ``old`` is no longer held.

    Args:
        length: places of ``old`` that hold keys and values; a runner may have written more, of drafts that
            were rejected.
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
        blocks: in the order of the places; HOLE where a block was given back.
        length: places that hold keys and values.
        salt: namespace of the prefix tree.
        published: leading blocks that are in the prefix tree, or were found not to belong there any more.
        sealed: nothing further is published: the chain to the root is broken, or eviction packed the cache.
        packed: places are no longer positions.
        punched: index of the first block that ``punch`` has not looked at.
    """

    block_size: int
    blocks: list[int] = field(default_factory=list)
    length: int = 0
    salt: str = ""
    published: int = 0
    sealed: bool = False
    packed: bool = False
    punched: int = 0
    _row: tuple[int, ...] | None = field(default=None, repr=False)

    @property
    def row(self) -> tuple[int, ...]:
        """The blocks as a step takes them; the same object until one of them changes."""
        if self._row is None:
            self._row = tuple(self.blocks)
        return self._row

    def add(self, blocks: Sequence[int]) -> None:
        """More blocks at the end."""
        if blocks:
            self.blocks += blocks
            self._row = None

    def put(self, index: int, block: int) -> None:
        """Another block in a place."""
        self.blocks[index] = block
        self._row = None

    @property
    def tail(self) -> int | None:
        """Index of the block that is partly filled: written next, though it may be shared."""
        return self.length // self.block_size if self.length % self.block_size else None

    def slot(self, place: int) -> int:
        """Where a place is in the pool; its block is no hole."""
        return self.blocks[place // self.block_size] * self.block_size + place % self.block_size

    def missing(self, count: int) -> int:
        """Blocks to add before ``count`` more places can be written."""
        return max(blocks_for(self.length + count, self.block_size) - len(self.blocks), 0)

    def held(self) -> Iterator[int]:
        """The blocks, last first: so the end of a chain becomes idle before its beginning."""
        return (block for block in reversed(self.blocks) if block != FREED)

    def copy(self) -> BlockTable:
        """The same places of the same blocks, without what is only reserved."""
        used = self.blocks[: blocks_for(self.length, self.block_size)]
        return BlockTable(
            self.block_size,
            used,
            self.length,
            self.salt,
            min(self.published, len(used)),
            self.sealed,
            self.packed,
            min(self.punched, len(used)),
        )

    def cut(self, length: int) -> list[int]:
        """Keeps places [0, length); the blocks behind, last first, are the caller's to release."""
        assert 0 <= length <= self.length, f"places [0, {self.length}) cannot be cut to {length}"
        keep = blocks_for(length, self.block_size)
        behind = [block for block in reversed(self.blocks[keep:]) if block != FREED]
        del self.blocks[keep:]
        self._row = None
        self.length = length
        self.published = min(self.published, length // self.block_size)
        self.punched = min(self.punched, keep)
        return behind

    def punch(self, start: int, stop: int) -> list[int]:
        """Makes holes of the whole blocks inside [start, stop); the blocks are the caller's to release.

        ``start`` is the same in every call; what was looked at before is not looked at again.
        """
        stop = min(stop, self.length)
        first, last = max(blocks_for(start, self.block_size), self.punched), stop // self.block_size
        found = [index for index in range(first, last) if self.blocks[index] != FREED]
        given = [self.blocks[index] for index in reversed(found)]
        for index in found:
            self.put(index, FREED)
        self.punched = max(self.punched, last)
        return given

    def check(self) -> None:
        """Raises AssertionError naming what does not fit together."""
        assert len(self.blocks) >= blocks_for(self.length, self.block_size), (
            f"{len(self.blocks)} blocks for {self.length} places"
        )
        assert self.published * self.block_size <= self.length, "a block was published before it was full"
        held = list(self.held())
        assert len(set(held)) == len(held), f"a table holds a block twice: {self.blocks}"
        assert self._row in (None, tuple(self.blocks)), "the row that steps take is out of date"
        assert self.tail is None or self.blocks[self.tail] != FREED, (
            "the block that is written next is a hole"
        )
