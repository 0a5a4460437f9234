"""Reference counts against a plain dictionary; block tables: cutting, freed blocks, copies."""

import random

import pytest

from attar.runtime.kv.blocks import BlockAllocator, BlockTable, blocks_for
from attar.runtime.step import FREED


def test_a_block_is_free_when_its_last_holder_releases_it():
    blocks = BlockAllocator(2)
    block = blocks.allocate()
    blocks.hold(block)
    assert blocks.count(block) == 2
    assert blocks.release(block) == 1
    assert blocks.count(block) == 1 and blocks.free == 1
    assert blocks.release(block) == 0
    assert blocks.free == 2


def test_misuse_is_an_error_and_not_a_slow_death():
    blocks = BlockAllocator(1)
    block = blocks.allocate()
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
            block = blocks.allocate()
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


def test_blocks_for_rounds_up():
    assert [blocks_for(positions, 4) for positions in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_missing_counts_what_is_reserved_already():
    table = BlockTable(4, [7, 8], length=5)
    assert [table.missing(count) for count in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert BlockTable(4, [7, 8, 9], length=5).missing(4) == 0


def test_the_tail_is_the_block_that_is_partly_filled():
    assert BlockTable(4, [7, 8], length=5).tail == 1
    assert BlockTable(4, [7, 8], length=8).tail is None
    assert BlockTable(4).tail is None


def test_cut_gives_the_blocks_behind_last_first():
    table = BlockTable(4, [5, 6, 7, 8], length=14, published=3)
    assert table.cut(6) == [8, 7]
    assert (table.blocks, table.length, table.published) == ([5, 6], 6, 1)
    with pytest.raises(AssertionError, match="cannot be cut"):
        table.cut(7)


def test_cut_also_frees_what_was_only_reserved():
    table = BlockTable(4, [5, 6, 7], length=5)
    assert table.cut(5) == [7]


def test_free_inside_takes_whole_blocks_and_only_once():
    table = BlockTable(4, [5, 6, 7, 8], length=15)
    assert table.free_inside(1, 13) == [7, 6]  # places [4, 12) are whole blocks inside [1, 13)
    assert table.blocks == [5, FREED, FREED, 8]
    assert table.free_inside(1, 99) == []  # the last block is partly filled
    assert list(table.held()) == [8, 5]
    table.check()


def test_entries_that_were_cut_off_are_freed_again_when_they_are_filled_anew():
    table = BlockTable(4, [5, 6, 7, 8], length=16)
    assert table.free_inside(0, 8) == [6, 5]
    assert table.free_inside(0, 16) == [8, 7]
    table.cut(8)
    table.add([3])
    table.length = 12
    assert table.free_inside(0, 12) == [3]
    assert table.copy().free_inside(0, 12) == []


def test_the_row_of_a_step_is_made_anew_only_when_a_block_changes():
    table = BlockTable(4, [5, 6], length=7)
    row = table.row
    table.length = 8
    table.add([])
    assert table.row is row == (5, 6)
    changes = (
        lambda: table.add([7]),
        lambda: table.put(1, 9),
        lambda: table.free_inside(0, 4),
        lambda: table.cut(5),
    )
    for change in changes:
        change()
        assert table.row == tuple(table.blocks) != row
        table.check()
        row = table.row
    table.blocks[0] = 3
    with pytest.raises(AssertionError, match="out of date"):
        table.check()


def test_a_copied_table_leaves_out_reserved_blocks_and_shares_no_list():
    table = BlockTable(4, [5, 6, 7], length=6, salt="a", published=1)
    other = table.copy()
    assert other == BlockTable(4, [5, 6], length=6, salt="a", published=1)
    other.blocks[0] = 9
    assert table.blocks[0] == 5


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        (BlockTable(4, [1], length=5), "1 blocks for 5 entries"),
        (BlockTable(4, [1, 1], length=5), "twice"),
        (BlockTable(4, [1, FREED], length=5), "was freed"),
        (BlockTable(4, [1, 2], length=5, published=2), "before it was full"),
    ],
)
def test_check_names_what_is_wrong_with_a_table(table, complaint):
    with pytest.raises(AssertionError, match=complaint):
        table.check()
