"""Block tables: cutting, holes and copies."""

import pytest

from attar.runtime.kv.table import Table, blocks_for
from attar.runtime.step import HOLE


def test_blocks_for_rounds_up():
    assert [blocks_for(places, 4) for places in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_missing_counts_what_is_reserved_already():
    table = Table(4, [7, 8], length=5)
    assert [table.missing(count) for count in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert Table(4, [7, 8, 9], length=5).missing(4) == 0


def test_the_tail_is_the_block_that_is_partly_filled():
    assert Table(4, [7, 8], length=5).tail == 1
    assert Table(4, [7, 8], length=8).tail is None
    assert Table(4).tail is None


def test_cut_gives_the_blocks_behind_last_first():
    table = Table(4, [5, 6, 7, 8], length=14, published=3)
    assert table.cut(6) == [8, 7]
    assert (table.blocks, table.length, table.published) == ([5, 6], 6, 1)
    with pytest.raises(AssertionError, match="cannot be cut"):
        table.cut(7)


def test_cut_also_frees_what_was_only_reserved():
    table = Table(4, [5, 6, 7], length=5)
    assert table.cut(5) == [7]


def test_punch_takes_whole_blocks_and_only_once():
    table = Table(4, [5, 6, 7, 8], length=15)
    assert table.punch(1, 13) == [7, 6]  # places [4, 12) are whole blocks inside [1, 13)
    assert table.blocks == [5, HOLE, HOLE, 8]
    assert table.punch(0, 13) == [5]
    assert table.punch(0, 99) == []  # the last block is partly filled
    assert list(table.held()) == [8]
    table.check()


def test_a_copy_leaves_out_reserved_blocks_and_shares_no_list():
    table = Table(4, [5, 6, 7], length=6, salt="a", published=1)
    other = table.copy()
    assert other == Table(4, [5, 6], length=6, salt="a", published=1)
    other.blocks[0] = 9
    assert table.blocks[0] == 5


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        (Table(4, [1], length=5), "1 blocks for 5 places"),
        (Table(4, [1, 1], length=5), "twice"),
        (Table(4, [1, HOLE], length=5), "is a hole"),
        (Table(4, [1, 2], length=5, published=2), "before it was full"),
    ],
)
def test_check_names_what_is_wrong(table, complaint):
    with pytest.raises(AssertionError, match=complaint):
        table.check()
