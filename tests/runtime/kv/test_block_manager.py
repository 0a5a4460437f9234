"""Memory of sequences against a model that cannot go wrong: every place's content is its whole prefix."""

import random

import pytest

from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.step import FREED

B = 4


def grow(manager, sequence, tokens, slots=None):
    """Reserves and commits what is missing of ``tokens`` (or ``slots`` slots)."""
    count = (slots or len(tokens)) - manager.table(sequence).length
    assert manager.reserve(sequence, count)
    manager.commit(sequence, count, tokens)


def test_a_prefix_is_found_only_after_it_was_computed_and_never_whole():
    manager, tokens = BlockManager(8, B), list(range(8))
    manager.admit(0, tokens)
    manager.reserve(0, 8)
    assert manager.matched(tokens) == 0
    manager.commit(0, 8, tokens)
    assert manager.matched(tokens) == 4  # one token must be run, so the last block is
    assert manager.matched([*tokens, 9]) == 8
    assert manager.admit(1, [*tokens, 9]) == 8
    assert manager.table(1).blocks == manager.table(0).blocks
    assert manager.admit(2, tokens, "other tenant") == 0
    assert manager.admit(3, tokens, most_cached=0) == 0
    assert manager.admit(4, [*tokens, 9], most_cached=6) == 4
    manager.check()


def test_without_reuse_nothing_is_published():
    manager, tokens = BlockManager(8, B, reuse=False), list(range(8))
    manager.admit(0, tokens)
    grow(manager, 0, tokens)
    assert manager.matched([*tokens, 9]) == 0
    manager.release(0)
    assert (manager.free, manager.cached) == (8, 0)


def test_released_blocks_stay_cached_until_they_are_needed():
    manager, tokens = BlockManager(4, B), list(range(9))
    manager.admit(0, tokens)
    grow(manager, 0, tokens)
    manager.release(0)
    assert (manager.free, manager.cached, manager.usage) == (2, 2, 0.0)
    manager.admit(1, list(range(50, 62)))
    assert manager.reserve(1, 12)
    assert (manager.free, manager.cached, manager.usage) == (0, 1, 0.75)
    assert manager.matched(tokens) == 4  # the end of the chain went first
    assert manager.stats.evicted == 4
    manager.check()


def test_a_fork_shares_all_blocks_and_copies_only_the_tail_it_writes():
    manager, tokens = BlockManager(8, B), list(range(6))
    manager.admit(0, tokens)
    grow(manager, 0, tokens)
    manager.fork(0, 1)
    shared = list(manager.table(0).blocks)
    assert manager.reserve(1, 1)
    assert manager.table(1).blocks[0] == shared[0] and manager.table(1).blocks[1] != shared[1]
    assert manager.copies() == ((shared[1], manager.table(1).blocks[1]),)
    assert manager.copies() == ()
    assert manager.reserve(0, 1) and manager.table(0).blocks == shared  # its only holder now
    assert manager.copies() == ()
    manager.check()


def test_a_published_block_is_copied_before_it_is_written_again():
    manager, tokens = BlockManager(8, B), list(range(8))
    manager.admit(0, tokens)
    grow(manager, 0, tokens)
    first = list(manager.table(0).blocks)
    manager.truncate(0, 6)
    assert manager.reserve(0, 1)
    assert manager.copies() == ((first[1], manager.table(0).blocks[1]),)
    assert manager.matched([*tokens, 9]) == 8
    manager.check()


def test_a_copy_whose_target_is_released_is_not_made():
    manager, tokens = BlockManager(4, B), list(range(6))
    manager.admit(0, tokens)
    grow(manager, 0, tokens)
    manager.fork(0, 1)
    manager.reserve(1, 1)
    manager.release(1)
    assert manager.copies() == ()


def test_out_of_blocks_changes_nothing():
    manager, tokens = BlockManager(3, B), list(range(6))
    manager.admit(0, tokens)
    grow(manager, 0, tokens)
    manager.fork(0, 1)
    before = list(manager.table(1).blocks)
    assert not manager.reserve(1, 7)  # a copy of the tail and two blocks, where one is free
    assert manager.table(1).blocks == before and manager.free == 1 and manager.copies() == ()
    assert manager.admit(2, list(range(50, 60))) is None
    assert manager.admit(2, [1, 2], spare=1) is None
    assert manager.admit(2, [1, 2]) == 0
    manager.check()


def test_equal_work_of_two_sequences_is_kept_once():
    manager, tokens = BlockManager(8, B), list(range(8))
    for sequence in (0, 1):
        manager.admit(sequence, tokens)
        manager.reserve(sequence, 8)
    for sequence in (0, 1):
        manager.commit(sequence, 8, tokens)
    assert manager.table(0).blocks == manager.table(1).blocks
    assert manager.free == 6
    manager.check()


def test_drafts_are_not_published():
    manager, tokens = BlockManager(8, B), list(range(6))
    manager.admit(0, tokens)
    grow(manager, 0, tokens, slots=8)  # two drafts
    assert manager.matched([0, 1, 2, 3, 4, 5, 6, 7, 8]) == 4
    manager.truncate(0, 6)
    grow(manager, 0, [0, 1, 2, 3, 4, 5, 8, 9])
    assert manager.matched([0, 1, 2, 3, 4, 5, 8, 9, 9]) == 8


def test_blocks_behind_the_window_are_given_back_but_sinks_stay():
    manager, tokens = BlockManager(16, B, window=8, sinks=4), list(range(24))
    manager.admit(0, tokens)
    grow(manager, 0, tokens)
    table = manager.table(0)
    assert [block == FREED for block in table.blocks] == [False, True, True, True, False, False]
    assert manager.matched([*tokens, 1]) == 24  # given back, and still cached
    assert manager.cached == 3
    manager.check()
    manager.release(0)
    assert manager.free + manager.cached == 16
    manager.check()


def test_the_window_counts_from_what_is_certain():
    manager, tokens = BlockManager(16, B, window=4), list(range(9))
    manager.admit(0, tokens)
    grow(manager, 0, tokens, slots=16)  # seven drafts, of which all may be rejected
    assert manager.table(0).blocks.count(FREED) == 1
    manager.truncate(0, 9)
    manager.check()


def test_packing_leaves_published_blocks_alone_and_ends_publishing():
    manager, tokens = BlockManager(8, B), list(range(14))
    manager.admit(0, tokens)
    grow(manager, 0, tokens)
    old = tuple(manager.table(0).blocks)
    packing = manager.pack(0, 6)
    assert packing.old == old and packing.kept == 6 and packing.new == tuple(manager.table(0).blocks)
    assert not set(packing.new) & set(old[:3])  # those are in the prefix tree
    assert manager.matched([*tokens, 1]) == 12
    manager.check()
    grow(manager, 0, [*tokens, *range(90, 99)], slots=12)
    assert len(manager._tree) == 3
    again = manager.pack(0, 5)
    assert again.new == again.old[:2]  # its own blocks are packed in place
    manager.check()


def test_packing_without_blocks_changes_nothing():
    manager, tokens = BlockManager(2, B), list(range(8))
    manager.admit(0, tokens)
    grow(manager, 0, tokens)
    assert manager.pack(0, 5) is None
    assert manager.table(0).length == 8 and not manager.table(0).packed
    manager.check()


def test_check_finds_a_leak():
    manager = BlockManager(4, B)
    manager.admit(0, [1, 2])
    manager.reserve(0, 2)
    manager._tables[0].blocks.clear()
    with pytest.raises(AssertionError, match="block 0 has 0 holders, but counts 1"):
        manager.check()


class World:
    """A manager, a pool whose slots hold prefixes, and what each sequence ought to hold."""

    def __init__(self, seed, capacity, **options):
        self.draw = random.Random(seed)
        self.manager = BlockManager(capacity, B, **options)
        self.pool = [None] * capacity * B
        self.prefixes = {(): 0}  # (prefix, token) -> number
        self.live, self.next = {}, 0  # id -> (tokens, contents of its places, salt)

    def number(self, before, token):
        return self.prefixes.setdefault((before, token), len(self.prefixes))

    def contents(self, tokens, salt):
        results = [self.number(salt, None)]
        for token in tokens:
            results.append(self.number(results[-1], token))
        return results[1:]

    def slot(self, sequence, place):
        block = self.manager.table(sequence).blocks[place // B]
        return None if block == FREED else block * B + place % B

    def copy(self):
        for old, new in self.manager.copies():
            self.pool[new * B : new * B + B] = self.pool[old * B : old * B + B]

    def admit(self):
        draw = self.draw
        tokens = [0] * draw.randrange(9) + [draw.randrange(2) for _ in range(draw.randrange(1, 13))]
        salt = draw.choice(["", "a"])
        actual = self.manager.admit(self.next, tokens, salt)
        if actual is not None:
            assert actual < len(tokens)
            self.live[self.next] = (tokens, self.contents(tokens[:actual], salt), salt)
            self.next += 1

    def append(self, sequence):
        """Writes some of the tokens that are missing, or new ones."""
        tokens, positions, salt = self.live[sequence]
        if len(positions) == len(tokens):
            tokens += [self.draw.randrange(2) for _ in range(self.draw.randrange(1, 4))]
        count = self.draw.randrange(1, len(tokens) - len(positions) + 1)
        if not self.manager.reserve(sequence, count):
            self.release(sequence)  # preempted
            return
        self.copy()
        for index in range(len(positions), len(positions) + count):
            positions.append(
                self.number(positions[-1] if positions else self.number(salt, None), tokens[index])
            )
            self.pool[self.slot(sequence, index)] = positions[-1]
        self.manager.commit(sequence, count, tokens)

    def fork(self, sequence):
        tokens, positions, salt = self.live[sequence]
        self.manager.fork(sequence, self.next)
        self.live[self.next] = (list(tokens), list(positions), salt)
        self.next += 1

    def truncate(self, sequence):
        tokens, positions, _ = self.live[sequence]
        back = self.draw.randrange(min(len(positions), 4))
        if self.manager.window is not None:
            back = 0  # what is certain stays; drafts have a test of their own
        self.manager.truncate(sequence, len(positions) - back)
        del positions[len(positions) - back :]
        del tokens[max(len(positions), 1) :]

    def release(self, sequence):
        self.manager.release(sequence)
        del self.live[sequence]

    def verify(self, sequence):
        _, positions, _ = self.live[sequence]
        for index, content in enumerate(positions):
            slot = self.slot(sequence, index)
            window = self.manager.window
            assert slot is not None or (window and self.manager.sinks <= index < len(positions) - window)
            assert slot is None or self.pool[slot] == content

    def turn(self):
        choice, ids = self.draw.random(), list(self.live)
        if not ids or choice < 0.12:
            return self.admit()
        sequence = self.draw.choice(ids)
        if choice < 0.7:
            self.append(sequence)
        elif choice < 0.78 and len(ids) < 9:
            self.fork(sequence)
        elif choice < 0.86 and self.live[sequence][1]:
            self.truncate(sequence)
        elif choice > 0.9:
            return self.release(sequence)
        return self.verify(sequence) if sequence in self.live else None


@pytest.mark.parametrize(
    ("turns", "options"),
    [
        (25_000, {}),
        (5_000, {"reuse": False}),
        (5_000, {"window": 6, "sinks": 3}),
        pytest.param(100_000, {}, marks=pytest.mark.slow),
        pytest.param(30_000, {"reuse": False}, marks=pytest.mark.slow),
        pytest.param(30_000, {"window": 6, "sinks": 3}, marks=pytest.mark.slow),
    ],
    ids=["reuse", "alone", "window", "reuse, more", "alone, more", "window, more"],
)
def test_nothing_is_lost_or_mixed_up_in_many_operations(turns, options):
    world = World(1, 24, **options)
    for turn in range(turns):
        world.turn()
        if turn % 50 == 0:
            world.manager.check()
    for sequence in list(world.live):
        world.verify(sequence)
        world.release(sequence)
    world.manager.check()
    world.manager.clear()
    assert world.manager.free == 24
    world.manager.check()
    if not options:
        assert min(world.manager.stats.hit, world.manager.stats.evicted) > turns / 100
