"""Reference counts against a plain dictionary."""

import random

import pytest

from attar.runtime.kv.blocks import BlockAllocator


def test_a_block_is_free_when_its_last_holder_releases_it():
    blocks = BlockAllocator(2)
    block = blocks.take()
    blocks.hold(block)
    assert not blocks.writable(block)
    assert blocks.release(block) == 1
    assert blocks.writable(block) and blocks.free == 1
    assert blocks.release(block) == 0
    assert blocks.free == 2


def test_misuse_is_an_error_and_not_a_slow_death():
    blocks = BlockAllocator(1)
    block = blocks.take()
    blocks.release(block)
    with pytest.raises(AssertionError, match=f"block {block} is released twice"):
        blocks.release(block)
    with pytest.raises(AssertionError, match="is free and cannot be shared"):
        blocks.hold(block)
    with pytest.raises(AssertionError, match="at least one block"):
        BlockAllocator(0)


def test_random_operations_agree_with_a_dictionary():
    draw, blocks, held = random.Random(0), BlockAllocator(13), {}
    for _ in range(20_000):
        choice = draw.random()
        if choice < 0.4 and blocks.free:
            block = blocks.take()
            assert block not in held
            held[block] = 1
        elif choice < 0.6 and held:
            block = draw.choice(sorted(held))
            blocks.hold(block)
            held[block] += 1
        elif held:
            block = draw.choice(sorted(held))
            held[block] -= 1
            assert blocks.release(block) == held[block]
            if not held[block]:
                del held[block]
        assert blocks.free == 13 - len(held)
        assert all(blocks.count(block) == held.get(block, 0) for block in range(13))
    blocks.check()


def test_check_names_a_lost_block():
    blocks = BlockAllocator(3)
    blocks._counts[1] = 1
    with pytest.raises(AssertionError, match=r"\[0, 2\] are not the free ones \[0, 1, 2\]"):
        blocks.check()
