"""Snapshots: the states at the end of published blocks, by which prefixes of a model with states are reused.

A prefix is reused up to a block that has a snapshot, because the tokens after it need the states there. One
is taken every few blocks of a sequence and at the last full block of its prompt, and belongs to the block of
the prefix tree: it is dropped with it, and under a bound the least recently used goes first. States are never
changed (``state_store.py``), so a sequence that starts from a snapshot shares it. Here they are opaque: the
runner makes and reads them.

    due → the runner keeps the states there → take → publish, when the block is in the tree → start
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

EVERY = 16  # blocks between two snapshots of a sequence
BYTES = 256 << 20  # of all snapshots


class StateSnapshots:
    """Snapshots by block.

    Args:
        block_size: B.
        most: snapshots that are kept.
        every: blocks from one to the next.

    Attributes:
        reused: sequences that started from a snapshot.
    """

    def __init__(self, block_size: int, most: int, every: int = EVERY) -> None:
        self.block_size, self.most, self.every = block_size, most, every
        self.reused = 0
        self._blocks: OrderedDict[int, Any] = OrderedDict()  # the last used at the end
        self._taken: dict[int, Mapping[int, Any]] = {}  # by sequence, of the step that has run
        self._starts: dict[int, Any] = {}  # of sequences that were admitted and have not run

    def __len__(self) -> int:
        """Snapshots that are kept."""
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        """Blocks with a snapshot, least recently used first."""
        return iter(list(self._blocks))

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def due(self, first: int, stop: int, prompt: int) -> tuple[int, ...]:
        """Positions in (first, stop] with a snapshot, where ``prompt`` is the length of the prompt."""
        size = self.block_size
        last = (prompt - 1) // size * size
        ends = range((first // size + 1) * size, stop + 1, size)
        return tuple(end for end in ends if end == last or end % (size * self.every) == 0)

    def take(self, sequence: int, states: Mapping[int, Any]) -> None:
        """A step has run, and has these states, by position."""
        self._taken[sequence] = states
        self._starts.pop(sequence, None)

    def publish(self, sequence: int, blocks: Mapping[int, int]) -> None:
        """The blocks of a sequence that are in the tree now, by the position of their end: their states are
        kept, the others of the step are not."""
        for position, state in self._taken.pop(sequence, {}).items():
            block = blocks.get(position)
            if block is not None:
                self._blocks.setdefault(block, state)
                self._blocks.move_to_end(block)
        while len(self._blocks) > self.most:
            self._blocks.popitem(last=False)

    def start(self, sequence: int, block: int) -> None:
        """A sequence continues behind a block."""
        self._blocks.move_to_end(block)
        self._starts[sequence] = self._blocks[block]
        self.reused += 1

    def started(self, sequence: int) -> Any | None:
        """The snapshot that a sequence continues from, before its first step."""
        return self._starts.get(sequence)

    def drop(self, block: int) -> None:
        """A block left the tree."""
        self._blocks.pop(block, None)

    def clear(self) -> None:
        """Nothing is kept: a new prefix tree is empty."""
        for kept in (self._blocks, self._taken, self._starts):
            kept.clear()

    def forget(self, sequence: int) -> None:
        """A sequence ended or was preempted."""
        self._taken.pop(sequence, None)
        self._starts.pop(sequence, None)
