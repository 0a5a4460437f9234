"""The input of a runner: the tokens of one step and the slots of their keys and values.

Letters: B slots of a block; T tokens of the step, all spans concatenated; W logits wanted in all.

The keys and values of one token are a cache entry of its sequence, and each entry is in a slot of the pool:
slot s is row s % B of block s // B, entry i is in slot ``blocks[i // B] * B + i % B``. Without eviction the
entry of a token is its position. Where eviction has packed the cache, entries [0, kept) hold what was kept of
positions [0, start), and the span's tokens go to entries [kept, kept + count). Blocks that were released
early (before every sliding window) are FREED in the block table: they are neither read nor written.

A runner may keep other state of a sequence (residuals, scores) until ``forget``. A span that starts before
the end of what was run overwrites the rest (rejected drafts); the first span of a sequence that starts after
0 was served by the prefix cache, always in whole blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

IntArray = NDArray[np.int64]
FREED = -1  # in a block table: the block was released early


@dataclass(frozen=True)
class TokenSpan:
    """One sequence's part of a step.

    Args:
        start: tokens [start, stop) of the sequence are run now; [0, start) have keys and values in the pool.
        stop: end of the tokens that are run.
        blocks: block table; it covers the entries of all tokens up to ``stop``.
        wants: logits of the last ``wants`` tokens of the span are returned: 0 during chunked prefill, 1 to
            decode, n + 1 to verify n drafts, more for the log-probabilities of a prompt.
        kept: entries in use before the span where eviction has packed the cache; None: ``start``.
        adapter: key of the LoRA adapter that its tokens run with; empty: none.
        drafts: tokens [stop - drafts, stop) may be rejected, also those of them that were run before.
        snapshots: after so many tokens the runner keeps its states of the sequence, for the prefix cache.
    """

    sequence: int
    start: int
    stop: int
    blocks: tuple[int, ...]
    wants: int = 0
    kept: int | None = None
    adapter: str = ""
    drafts: int = 0
    snapshots: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Tokens that are run."""
        return self.stop - self.start

    @property
    def offset(self) -> int:
        """Entry of the span's first token, which attends to entries [0, offset)."""
        return self.start if self.kept is None else self.kept

    @property
    def end(self) -> int:
        """Entries in use after the span."""
        return self.offset + self.count

    def slots(self, block_size: int) -> IntArray:
        """Slots that the span's tokens are written to; int64 (count,)."""
        return slots(self.blocks, self.offset, self.end, block_size)

    def context(self, block_size: int) -> IntArray:
        """Slots of all entries [0, end), the span's own last; int64 (end,). FREED blocks give negative
        slots."""
        return slots(self.blocks, 0, self.end, block_size)


@dataclass(frozen=True)
class StepInput:
    """One pass through the model.

    Args:
        tokens: T, of all spans concatenated.
        spans: at most one per sequence.
        copies: (from, to) blocks to copy before anything is run, in this order (copy-on-write).
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
        return (0, *accumulate(span.count for span in self.spans))

    @cached_property
    def positions(self) -> IntArray:
        """Position of each token, for the rotary embedding; int64 (T,)."""
        return _concatenate([span.start + depths(span.count, tree) for span, tree in self.trees()])

    @cached_property
    def rows(self) -> IntArray:
        """Tokens of the step whose logits are wanted, in the order of the spans; int64 (W,)."""
        ends = zip(self.spans, self.offsets[1:], strict=True)
        return _concatenate([np.arange(stop - span.wants, stop) for span, stop in ends])

    def wanted_of(self, spans: Sequence[int]) -> IntArray:
        """Rows of the logits of some spans, by their indices; int64."""
        starts = (0, *accumulate(span.wants for span in self.spans))
        return _concatenate([np.arange(starts[index], starts[index + 1]) for index in spans])

    def rows_of(self, adapter: str) -> IntArray:
        """Tokens of the step whose spans have an adapter; int64."""
        ranges = zip(self.spans, self.offsets, self.offsets[1:], strict=False)
        return _concatenate(
            [np.arange(start, stop) for span, start, stop in ranges if span.adapter == adapter]
        )

    def slots(self, block_size: int) -> IntArray:
        """Slot that each token's key and value are written to; int64 (T,)."""
        return _concatenate([span.slots(block_size) for span in self.spans])

    def trees(self) -> list[tuple[TokenSpan, tuple[int, ...] | None]]:
        """Every span with its parents, None for a chain."""
        return list(zip(self.spans, self.parents or [None] * len(self.spans), strict=True))

    def part(self, spans: Sequence[int]) -> StepInput:
        """A step with some of the spans, by their indices, and with all copies."""
        ranges = [slice(self.offsets[index], self.offsets[index + 1]) for index in spans]
        tokens = [token for part in ranges for token in self.tokens[part]]
        parents = None if self.parents is None else tuple(self.parents[index] for index in spans)
        return StepInput(tokens, tuple(self.spans[index] for index in spans), self.copies, parents)

    def repeatable(self, block_size: int) -> bool:
        """Whether its copies may be made again after a part of it was run: no copy's source is a target, and
        no source row is overwritten that its target needs (later rows the target writes itself)."""
        targets = {target for _, target in self.copies}
        first: dict[int, int] = {}  # first row that is written, by block
        for slot in self.slots(block_size).tolist() if self.copies else ():
            block, row = divmod(slot, block_size)
            first[block] = min(row, first.get(block, block_size))
        return all(
            source not in targets and self._needs(target, block_size) <= first.get(source, block_size)
            for source, target in self.copies
        )

    def _needs(self, block: int, block_size: int) -> int:
        """Leading rows of a block with entries from before the step."""
        for span in self.spans:
            if block in span.blocks:
                return min(max(span.offset - span.blocks.index(block) * block_size, 0), block_size)
        return block_size

    def check(self, block_size: int, capacity: int | None = None) -> None:
        """Raises AssertionError naming what is inconsistent.

        Args:
            block_size: B.
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
        """Positions that the model was trained for; None: not known."""
        ...

    def run(self, step: StepInput) -> Tensor:
        """Copies blocks, writes keys and values; returns logits float32 (W, vocabulary), spans in order."""
        ...

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Move the content of slots, (from, to), one pair after the other: the accepted path of a draft tree
        moves to consecutive entries. Both are unshared slots of one sequence."""
        ...

    def fork(self, sequence: int, child: int) -> None:
        """``child`` starts with the tokens and blocks of ``sequence``: the runner copies its state."""
        ...

    def forget(self, sequence: int) -> None:
        """A sequence ended or was preempted: delete its state. An unknown one is no error."""
        ...


def slots(blocks: Sequence[int], start: int, stop: int, block_size: int) -> IntArray:
    """Slots of entries [start, stop) of a block table; int64 (stop - start,)."""
    if stop == start + 1:  # decoding: most spans
        return np.array([blocks[start // block_size] * block_size + start % block_size], dtype=np.int64)
    first, last = start // block_size, -(-stop // block_size)
    entries = np.arange(start, stop)
    used = np.asarray(blocks[first:last], dtype=np.int64)
    return used[entries // block_size - first] * block_size + entries % block_size


def depths(count: int, parents: Sequence[int] | None) -> IntArray:
    """Distance of each token of a span to the span's prefix: 0 for the first; int64 (count,)."""
    distance = np.arange(count)
    if parents is not None:
        for index, parent in enumerate(parents):
            distance[index] = 0 if parent < 0 else distance[parent] + 1
    return distance


def ancestors(parents: Sequence[int]) -> NDArray[np.bool_]:
    """The tokens of a tree that each token sees: its ancestors and itself; bool (n, n)."""
    seen = np.eye(len(parents), dtype=np.bool_)
    for index, parent in enumerate(parents):
        if parent >= 0:
            seen[index] |= seen[parent]
    return seen


def _check_span(span: TokenSpan, tree: Sequence[int] | None, block_size: int) -> None:
    name = f"sequence {span.sequence}"
    assert 0 <= span.start < span.stop, f"{name} runs [{span.start}, {span.stop})"
    assert 0 <= span.wants <= span.count, f"{name} wants {span.wants} of {span.count} logits"
    assert span.end <= len(span.blocks) * block_size, f"{name} has too few blocks for {span.end} entries"
    assert bool((span.slots(block_size) >= 0).all()), f"{name} writes to a block that was released"
    if tree is not None:
        assert len(tree) == span.count, f"{name} has {len(tree)} parents for {span.count} tokens"
        ordered = all(-1 <= parent < index for index, parent in enumerate(tree))
        assert ordered, f"{name}: a parent comes after its child"


def _concatenate(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
