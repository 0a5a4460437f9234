"""The map of the blocks against what the manager was told to do."""

from __future__ import annotations

import random

import numpy as np

from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.kv.block_map import block_map, cell_codes
from tests.runtime.kv.test_block_manager import B, grow


def test_each_state_is_on_the_map():
    manager = BlockManager(10, B)
    manager.admit(0, list(range(9)))
    grow(manager, 0, list(range(9)))
    manager.release(0)  # two published blocks stay cached, the third is free
    manager.admit(1, [*range(4), 50])  # takes the first cached one
    grow(manager, 1, [*range(4), 50])
    manager.fork(1, 2)
    manager.admit(3, [70])
    grow(manager, 3, [70])
    one = block_map(manager)
    assert one.states == {"free": 6, "cached": 1, "owned": 1, "shared": 2} and one.quantized == 0
    assert (one.cell_blocks, one.block_size) == (1, B)
    assert {letter: one.cells.count(letter) for letter in "fcos"} == {"f": 6, "c": 1, "o": 1, "s": 2}


def test_quantized_blocks_are_capital_but_those_being_filled_and_free_ones():
    manager = BlockManager(6, B)
    manager.admit(0, list(range(9)))
    grow(manager, 0, list(range(9)))
    filled = manager.table(0).blocks[-1]
    seen = block_map(manager, "kivi2", [filled])
    assert seen.quantized == 2 and seen.cells.count("O") == 2 and seen.cells[filled] == "o"
    assert block_map(manager, "int8").quantized == 3 and block_map(manager, "bfloat16").quantized == 0


def test_a_cell_of_several_blocks_shows_the_state_of_most_that_are_in_use():
    assert cell_codes(np.array([0, 0, 2, 0, 1, 3, 3, 0, 0, 0, 0, 0, 1]), 4) == [2, 3, 0, 1]
    manager = BlockManager(1000, B)
    manager.admit(0, [1])
    grow(manager, 0, [1])
    seen = block_map(manager, max_cells=64)
    assert seen.cell_blocks == 16 and len(seen.cells) == 63 and seen.cells.count("o") == 1
    assert seen.states == {"free": 999, "cached": 0, "owned": 1, "shared": 0}


def test_the_numbers_are_the_managers_whatever_happens():
    draws, manager = random.Random(0), BlockManager(40, B)
    live: dict[int, list[int]] = {}
    for number in range(300):
        if live and draws.random() < 0.45:
            manager.release(gone := draws.choice(list(live)))
            del live[gone]
        elif live and draws.random() < 0.2:
            manager.fork(parent := draws.choice(list(live)), number)
            live[number] = live[parent]
        else:
            tokens = [draws.randrange(2) for _ in range(draws.randint(1, 14))]
            if manager.admit(number, tokens) is None:
                continue
            live[number] = tokens
            grow(manager, number, tokens)
        states = block_map(manager).states
        assert states["free"] == manager.free and states["cached"] == manager.cached
        holders = [block for id in live for block in manager.table(id).held()]
        assert states["shared"] == sum(holders.count(block) > 1 for block in set(holders))
