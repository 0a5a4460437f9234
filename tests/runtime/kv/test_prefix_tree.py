"""The prefix tree against brute force: a dictionary of whole prefixes, and a search for the oldest leaf."""

import random

import pytest

from attar.runtime.kv.blocks import BlockAllocator
from attar.runtime.kv.prefix_tree import PrefixTree

B = 2


def published(tree, blocks, tokens, salt=""):
    """Publishes tokens on fresh blocks and lets go of them: only the tree holds them."""
    own = [blocks.allocate() for _ in range(len(tokens) // B)]
    actual = tree.publish(tokens, own, 0, salt)
    for block in reversed(own):
        if blocks.release(block) == 1:
            tree.note_idle(block)
    return actual


@pytest.fixture
def blocks():
    return BlockAllocator(16)


@pytest.fixture
def tree(blocks):
    return PrefixTree(blocks, B)


def test_match_stops_at_the_first_block_that_differs(tree, blocks):
    block_ids = published(tree, blocks, [1, 2, 3, 4, 5, 6])
    assert tree.match([1, 2, 3, 4, 9, 9]) == block_ids[:2]
    assert tree.match([1, 2, 3]) == block_ids[:1]  # half a block is none
    assert tree.match([2, 1]) == []
    assert len(tree.peek([1, 2, 3, 4, 5, 6, 7])) == 3


def test_salts_share_nothing_and_leave_nothing(tree, blocks):
    published(tree, blocks, [1, 2], "a")
    assert tree.match([1, 2], "b") == [] and tree.match([1, 2]) == []
    assert tree.evict(9) == 1
    assert not tree._roots
    tree.check()


def test_equal_tokens_keep_the_first_block(tree, blocks):
    first = published(tree, blocks, [1, 2, 3, 4])
    again = published(tree, blocks, [1, 2, 5, 6])
    assert again[0] == first[0] and again[1] != first[1]
    assert len(tree) == 3 and blocks.free == 13
    tree.check()


def test_the_oldest_leaf_goes_first_and_parents_after_children(tree, blocks):
    old = published(tree, blocks, [1, 2, 3, 4])
    new = published(tree, blocks, [5, 6, 7, 8])
    tree.match([1, 2])  # the parent is used, the leaf below it is still the oldest
    assert tree.evict(1) == 1 and old[1] not in tree and old[0] in tree
    assert tree.evict(1) == 1 and new[1] not in tree
    assert tree.evict(1) == 1 and new[0] not in tree
    assert tree.match([1, 2]) == old[:1]


def test_what_a_sequence_holds_is_not_evicted(tree, blocks):
    block_ids = published(tree, blocks, [1, 2, 3, 4])
    for block in block_ids:
        blocks.hold(block)
    assert tree.evict(9) == 0
    blocks.release(block_ids[0])  # given back early: its child keeps it in the tree
    tree.note_idle(block_ids[0])
    assert tree.evict(9) == 0 and tree.match([1, 2, 3, 4]) == block_ids
    blocks.release(block_ids[1])
    tree.note_idle(block_ids[1])
    assert tree.evict(9) == 2 and blocks.free == 16


def test_a_chain_that_was_evicted_is_not_continued(tree, blocks):
    own = [blocks.allocate() for _ in range(2)]
    tree.publish([1, 2], own[:1], 0)
    blocks.release(own[0])
    tree.note_idle(own[0])
    tree.evict(1)
    assert tree.publish([1, 2, 3, 4], own, 1) is None
    tree.check()


def test_the_heap_of_idle_leaves_stays_small(tree, blocks):
    published(tree, blocks, [1, 2])
    for _ in range(1000):
        tree.match([1, 2])
    assert len(tree._idle) < 100
    tree.check()


class Oracle:
    """Whole prefixes with their block and time; everything by search."""

    def __init__(self):
        self.nodes, self.clock = {}, 0

    def path(self, tokens, salt):
        keys = [(salt, tuple(tokens[: stop + B])) for stop in range(0, len(tokens) - B + 1, B)]
        results = []
        for key in keys:
            if key not in self.nodes:
                break
            results.append(key)
        return results

    def match(self, tokens, salt):
        self.clock += 1
        actual = self.path(tokens, salt)
        for key in actual:
            self.nodes[key][1] = self.clock
        return [self.nodes[key][0] for key in actual]

    def publish(self, tokens, own, salt):
        self.clock += 1
        given = []
        for index, block in enumerate(own):
            node = self.nodes.setdefault((salt, tuple(tokens[: (index + 1) * B])), [block, 0])
            node[1] = self.clock
            given.append(node[0])
        return given

    def evict(self, held):
        parents = {(salt, tokens[:-B]) for salt, tokens in self.nodes}
        leaves = [(n[1], key) for key, n in self.nodes.items() if key not in parents and not held[n[0]]]
        if leaves:
            del self.nodes[min(leaves)[1]]
        return len(leaves) > 0


def test_random_operations_agree_with_brute_force(blocks, tree):
    draw, oracle, users = random.Random(3), Oracle(), []
    held = [0] * 16
    for turn in range(8_000):
        tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 9))]
        salt = draw.choice(["", "a"])
        choice = draw.random()
        if choice < 0.35:
            actual = tree.match(tokens, salt)
            assert actual == oracle.match(tokens, salt)
            for block in actual:
                blocks.hold(block)
                held[block] += 1
            users.append(actual)
        elif choice < 0.6 and blocks.free >= len(tokens) // B > 0:
            own = [blocks.allocate() for _ in range(len(tokens) // B)]
            assert tree.publish(tokens, own, 0, salt) == oracle.publish(tokens, own, salt)
            for block in reversed(own):
                if blocks.release(block) == 1:
                    tree.note_idle(block)
        elif choice < 0.8 and users:
            for block in reversed(users.pop(draw.randrange(len(users)))):
                held[block] -= 1
                if blocks.release(block) == 1:
                    tree.note_idle(block)
        else:
            assert tree.evict(1) == oracle.evict(held)
        assert len(tree) == len(oracle.nodes)
        if turn % 50 == 0:
            tree.check()
            assert all(node[0] in tree for node in oracle.nodes.values())
