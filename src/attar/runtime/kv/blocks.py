"""Blocks of the pool with reference counts.

A block is free when nobody holds it. Holders are block tables and the prefix tree, one reference each; a
block may be written only by its single holder, so what is shared or published is read-only without further
flags. Free blocks are handed out last in, first out: what was used last is still in the processor's caches.

Source: vLLM 0.6.1 (``core/block``). Differs: the prefix tree is a holder like any other.
"""

from __future__ import annotations


class BlockAllocator:
    """Counts of ``capacity`` blocks, numbered from 0.

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
        """Blocks that nobody holds."""
        return len(self._free)

    def count(self, block: int) -> int:
        """Holders of a block."""
        return self._counts[block]

    def writable(self, block: int) -> bool:
        """Whether the one who asks is the block's only holder."""
        return self._counts[block] == 1

    def take(self) -> int:
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
        """Raises AssertionError naming the block whose count and place disagree."""
        listed = sorted(self._free)
        assert len(set(listed)) == len(listed), f"a block is free twice: {listed}"
        unheld = [block for block, count in enumerate(self._counts) if count == 0]
        assert unheld == listed, f"blocks without holders {unheld} are not the free ones {listed}"
        assert min(self._counts) >= 0, "a block has a negative count"
