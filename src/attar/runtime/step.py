"""What the scheduler hands to a runner: the tokens of one step and where their keys and values go.

Letters: B tokens in a block; T tokens of the step, all spans' one after the other; W logits wanted in all.

A sequence's keys and values lie in slots of the pool: slot s is row s % B of block s // B. Place t of a
sequence is slot ``blocks[t // B] * B + t % B``. Without eviction the place of a token is its position. Where
eviction has packed the cache, places [0, kept) hold what was kept of positions [0, start), and the span's
tokens go to places [kept, kept + count). Blocks that were given back early (behind every sliding window) are
HOLE in the block table: nobody reads or writes there.

A runner may keep what else it needs per sequence (residuals, scores) until ``forget``. A span that starts
before the end of what was run takes the rest back (rejected drafts); one of a new sequence that starts
behind 0 was served by the prefix cache, always in whole blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

IntArray = NDArray[np.int64]
FREED = -1  # a block table's entry whose block was given back


@dataclass(frozen=True)
class TokenSpan:
    """One sequence's part of a step.

    Args:
        sequence: its id.
        start: tokens [start, stop) of the sequence are run now; [0, start) have keys and values in the pool.
        stop: end of the tokens that are run.
        blocks: block table; it covers the places of all tokens up to ``stop``.
        wants: logits of the last ``wants`` tokens of the span are returned: 0 while a prompt is chunked, 1 to
            decode, n + 1 to verify n drafts, more for the log-probabilities of a prompt.
        kept: places in use before the span where eviction has packed the cache; None: ``start``.
    """

    sequence: int
    start: int
    stop: int
    blocks: tuple[int, ...]
    wants: int = 0
    kept: int | None = None

    @property
    def count(self) -> int:
        """Tokens that are run."""
        return self.stop - self.start

    @property
    def place(self) -> int:
        """Where the first token of the span goes: its keys and values see places [0, place)."""
        return self.start if self.kept is None else self.kept

    @property
    def end(self) -> int:
        """Places in use after the span."""
        return self.place + self.count

    def slots(self, block_size: int) -> IntArray:
        """Slots that the span's tokens are written to; int64 (count,)."""
        return slots(self.blocks, self.place, self.end, block_size)

    def context(self, block_size: int) -> IntArray:
        """Slots of every place [0, end), the span's own last; int64 (end,). A hole gives negative slots."""
        return slots(self.blocks, 0, self.end, block_size)


@dataclass(frozen=True)
class StepInput:
    """One pass through the model.

    Args:
        tokens: all spans' tokens, one after the other; T of them.
        spans: at most one per sequence.
        copies: (from, to) blocks that are copied before anything is run, in this order (copy-on-write).
        parents: per span None (a chain) or a tree: for each token of the span the index inside the span of
            the token it follows, smaller than its own; -1 where it follows the prefix. A token attends to the
            prefix, its ancestors and itself; siblings share a position, and each has its own slot.
    """

    tokens: Sequence[int]
    spans: tuple[TokenSpan, ...]
    copies: tuple[tuple[int, int], ...] = ()
    parents: tuple[tuple[int, ...] | None, ...] | None = None

    @property
    def count(self) -> int:
        """T."""
        return len(self.tokens)

    @property
    def wants(self) -> int:
        """W: rows of logits that the runner returns."""
        return sum(span.wants for span in self.spans)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Span i's tokens are [offsets[i], offsets[i + 1]) of the step; one more than there are spans."""
        found = [0]
        for span in self.spans:
            found.append(found[-1] + span.count)
        return tuple(found)

    @cached_property
    def positions(self) -> IntArray:
        """Position of each token, for the rotary embedding; int64 (T,)."""
        return _joined([span.start + depths(span.count, tree) for span, tree in self.trees()])

    @cached_property
    def rows(self) -> IntArray:
        """Tokens of the step whose logits are wanted, in the order of the spans; int64 (W,)."""
        ends = zip(self.spans, self.offsets[1:], strict=True)
        return _joined([np.arange(stop - span.wants, stop) for span, stop in ends])

    def slots(self, block_size: int) -> IntArray:
        """Slot that each token's key and value are written to; int64 (T,)."""
        return _joined([span.slots(block_size) for span in self.spans])

    def trees(self) -> list[tuple[TokenSpan, tuple[int, ...] | None]]:
        """Every span with its parents, None for a chain."""
        return list(zip(self.spans, self.parents or [None] * len(self.spans), strict=True))

    def part(self, spans: Sequence[int]) -> StepInput:
        """The same step with some of its spans only, by their indices; all its copies."""
        ranges = [slice(self.offsets[index], self.offsets[index + 1]) for index in spans]
        tokens = [token for some in ranges for token in self.tokens[some]]
        parents = None if self.parents is None else tuple(self.parents[index] for index in spans)
        return StepInput(tokens, tuple(self.spans[index] for index in spans), self.copies, parents)

    def repeatable(self, block_size: int) -> bool:
        """Whether its copies may be made again after it was run in part: no target is read, and nothing is
        written where a target needs what was there (behind that, it writes itself)."""
        targets = {target for _, target in self.copies}
        first: dict[int, int] = {}  # place of a block that is written
        for slot in self.slots(block_size).tolist() if self.copies else ():
            block, place = divmod(slot, block_size)
            first[block] = min(place, first.get(block, block_size))
        return all(
            source not in targets and self._needs(target, block_size) <= first.get(source, block_size)
            for source, target in self.copies
        )

    def _needs(self, block: int, block_size: int) -> int:
        """Places of a block, from its first, that hold what was there before the step."""
        for span in self.spans:
            if block in span.blocks:
                return min(max(span.place - span.blocks.index(block) * block_size, 0), block_size)
        return block_size

    def check(self, block_size: int, capacity: int | None = None) -> None:
        """Raises AssertionError naming what does not fit together.

        Args:
            block_size: B.
            capacity: blocks of the pool.
        """
        assert self.offsets[-1] == self.count, f"{self.count} tokens for spans of {self.offsets[-1]}"
        ids = [span.sequence for span in self.spans]
        assert len(set(ids)) == len(ids), f"a sequence has two spans: {ids}"
        for span, tree in self.trees():
            _check_span(span, tree, block_size)
        targets = [target for _, target in self.copies]
        assert len(set(targets)) == len(targets), f"a block is copied to twice: {self.copies}"
        written = self.slots(block_size)
        assert len(np.unique(written)) == len(written), "two tokens of the step are written to one slot"
        outside = capacity is not None and written.max(initial=0) >= capacity * block_size
        assert not outside, "a slot is outside the pool"


class Runner(Protocol):
    """A model that runs steps on a pool of blocks which it owns."""

    @property
    def block_size(self) -> int:
        """B."""
        ...

    @property
    def capacity(self) -> int:
        """Blocks of the pool."""
        ...

    @property
    def vocabulary(self) -> int:
        """Columns of the logits."""
        ...

    @property
    def context(self) -> int | None:
        """Most positions the model was made for; None where nothing says so."""
        ...

    def run(self, step: StepInput) -> Tensor:
        """Copies blocks, writes keys and values; returns logits float32 (W, vocabulary), spans in order."""
        ...

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """What slots hold goes to other slots, (from, to), one after the other: the path that was accepted
        of a tree goes to consecutive places. Both are slots of one sequence that nobody shares."""
        ...

    def fork(self, sequence: int, child: int) -> None:
        """``child`` begins with the tokens and blocks of ``sequence``: what is kept of it is copied."""
        ...

    def forget(self, sequence: int) -> None:
        """A sequence ended or was preempted: what is kept of it (residuals, scores) goes. Unknown is fine."""
        ...


def slots(blocks: Sequence[int], start: int, stop: int, block_size: int) -> IntArray:
    """Slots of places [start, stop) of a block table; int64 (stop - start,)."""
    if stop == start + 1:  # decoding: most spans
        return np.array([blocks[start // block_size] * block_size + start % block_size], dtype=np.int64)
    first, last = start // block_size, -(-stop // block_size)
    places = np.arange(start, stop)
    near = np.asarray(blocks[first:last], dtype=np.int64)
    return near[places // block_size - first] * block_size + places % block_size


def depths(count: int, parents: Sequence[int] | None) -> IntArray:
    """Distance of each token of a span to the span's prefix: 0 for the first; int64 (count,)."""
    found = np.arange(count)
    if parents is not None:
        for index, parent in enumerate(parents):
            found[index] = 0 if parent < 0 else found[parent] + 1
    return found


def _check_span(span: TokenSpan, tree: Sequence[int] | None, block_size: int) -> None:
    name = f"sequence {span.sequence}"
    assert 0 <= span.start < span.stop, f"{name} runs [{span.start}, {span.stop})"
    assert 0 <= span.wants <= span.count, f"{name} wants {span.wants} of {span.count} logits"
    assert span.end <= len(span.blocks) * block_size, f"{name} has too few blocks for {span.end} places"
    assert bool((span.slots(block_size) >= 0).all()), f"{name} writes to a block that was given back"
    if tree is not None:
        assert len(tree) == span.count, f"{name} has {len(tree)} parents for {span.count} tokens"
        ordered = all(-1 <= parent < index for index, parent in enumerate(tree))
        assert ordered, f"{name}: a parent comes after its child"


def _joined(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
