"""Blocks and the prefix tree together: what is free, what is only cached, what somebody holds.

    free + cached + owned = all blocks        cached: held by the tree alone, let go when blocks are short

Tables hold and release blocks here and nowhere else, so that ``cached`` is counted as it changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from attar.runtime.kv.blocks import BlockAllocator
from attar.runtime.kv.prefix_tree import PrefixTree


@dataclass(frozen=True)
class PrefixCacheStats:
    """What happened since the start, in tokens."""

    asked: int  # of sequences that were admitted
    hit: int  # of these, found in the prefix tree
    evicted: int  # let go by the prefix tree


class Stock:
    """All blocks of a pool.

    Args:
        capacity: how many.
        block_size: B.

    Attributes:
        cached: blocks that only the tree holds.
        evicted: blocks that the tree let go since the start.
    """

    def __init__(self, capacity: int, block_size: int) -> None:
        self.blocks = BlockAllocator(capacity)
        self.tree = PrefixTree(self.blocks, block_size)
        self.cached = self.evicted = 0

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return self.blocks.free

    def take(self, wanted: int) -> list[int] | None:
        """So many blocks, evicting cached ones where there are no free ones; None: there are too few."""
        if wanted > self.free:
            self.evict(wanted - self.free)
        return [self.blocks.take() for _ in range(wanted)] if wanted <= self.free else None

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder of each."""
        for block in blocks:
            if self.blocks.count(block) == 1 and block in self.tree:
                self.cached -= 1
            self.blocks.hold(block)

    def release(self, block: int) -> bool:
        """One holder less; whether the block is free now."""
        left = self.blocks.release(block)
        if left == 1 and block in self.tree:
            self.cached += 1
            self.tree.idle(block)
        return left == 0

    def evict(self, wanted: int) -> int:
        """Lets go of up to ``wanted`` cached blocks, the oldest first; how many it was."""
        done = self.tree.evict(wanted)
        self.cached -= done
        self.evicted += done
        return done

    def check(self, holders: Sequence[int]) -> None:
        """Raises AssertionError naming what is wrong.

        Args:
            holders: tables that hold each block.
        """
        self.blocks.check()
        self.tree.check()
        for block, owners in enumerate(holders):
            known, counted = owners + (block in self.tree), self.blocks.count(block)
            assert known == counted, f"block {block} has {known} holders, but counts {counted}"
        owned, capacity = sum(1 for owners in holders if owners), self.blocks.capacity
        sizes = f"free {self.free} + cached {self.cached} + owned {owned}"
        assert self.free + self.cached + owned == capacity, f"{sizes} are not {capacity} blocks"
