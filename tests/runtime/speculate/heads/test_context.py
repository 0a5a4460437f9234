"""What a reader gives of a sequence's states, what a head's cache keeps of them, and who keeps them."""

import numpy as np
import pytest
import torch

from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.kv.hidden_pool import HiddenPool
from attar.runtime.runner.compiled import compiled
from attar.runtime.runner.device.runner import device_runner
from attar.runtime.runner.modules import Modules
from attar.runtime.speculate.heads.cache import HeadCache
from attar.runtime.speculate.heads.context import ContextReader
from attar.runtime.speculate.proposer import DraftRequest
from attar.runtime.step import FREED, StepInput, TokenSpan
from tests import tiny_models
from tests.compiler import no_compiler

B = 4


def reader_of(layers=(2,), blocks=8):
    """Slot s has the state s."""
    pool = HiddenPool.of(layers, blocks * B, 1)
    pool.states[:] = torch.arange(blocks * B)[:, None, None]
    return ContextReader(pool, B)


def asked(count, blocks, sequence=0):
    return DraftRequest(sequence, [7] * count, 3, blocks=blocks)


def given(reader, request):
    start, states = reader.unread(request)
    return start, states[:, 0, 0].int().tolist()


def test_each_position_is_read_once():
    reader = reader_of()
    assert given(reader, asked(7, (5, 2))) == (0, [20, 21, 22, 23, 8, 9])
    assert given(reader, asked(7, (5, 2))) == (6, [])
    assert given(reader, asked(10, (5, 2, 0))) == (6, [10, 11, 0])
    assert int(reader.last(asked(10, (5, 2, 0)))) == 0
    reader.forget(0)
    assert given(reader, asked(3, (1,))) == (0, [4, 5])


def test_a_block_that_was_exchanged_is_read_again_and_no_other():
    reader = reader_of()
    given(reader, asked(10, (5, 2, 0)))
    assert given(reader, asked(11, (5, 3, 0))) == (4, [12, 13, 14, 15, 0, 1])


def test_blocks_that_were_released_are_neither_read_nor_a_reason_to_read():
    reader = reader_of()
    assert given(reader, asked(11, (FREED, 2, 0))) == (4, [8, 9, 10, 11, 0, 1])
    assert given(reader, asked(12, (FREED, FREED, 0))) == (10, [2])
    assert given(reader, asked(18, (FREED, FREED, FREED, FREED, 6))) == (16, [24]), "what it missed is gone"


def test_of_more_than_the_window_the_last_positions_are_read():
    reader = reader_of()
    reader.window = 3
    assert given(reader, asked(7, (5, 2))) == (3, [23, 8, 9]), "of a prompt"
    assert given(reader, asked(9, (5, 2))) == (6, [10, 11]), "no more than is new"
    assert given(reader, asked(14, (5, 2, 0, 3))) == (10, [2, 3, 12]), "after tokens without drafts"
    assert given(reader, asked(14, (5, 6, 0, 3))) == (10, [2, 3, 12]), "a block was exchanged"


def test_a_cache_begins_where_its_positions_begin():
    cache, rows = HeadCache(2, 1, 3), torch.randn(2, 200, 1, 3)
    assert cache.read(0)[0].shape == (2, 0, 1, 3) and cache.first(0) == 0

    def written(start, stop):
        cache.write(0, start, rows[:, start:stop], -rows[:, start:stop])
        keys, values = cache.read(0)
        assert torch.equal(keys, -values)
        first = cache.first(0)
        assert torch.equal(keys, rows[:, first:stop]), "entries are at their places"
        return first

    assert written(8, 20) == 8, "the first positions are missing"
    assert written(20, 120) == 8, "it grows"
    assert written(100, 130) == 8 and written(130, 131) == 8
    assert written(140, 150) == 140, "positions between are missing: those before them are dropped"
    assert written(0, 30) == 0, "run again from its start"
    cache.forget(0)
    assert cache.read(0)[0].shape == (2, 0, 1, 3) and cache.nbytes == 0


def test_a_block_that_is_source_and_target_of_copies_has_what_it_has_now():
    """7 is copied from 3, and 3, which is free then, from 9: now the first copy's content is in 3."""
    manager = BlockManager(8, B)
    manager.admit(0, [1] * 6)
    manager.reserve(0, 6)
    manager.commit(0, 6, [1] * 6)
    manager.fork(0, 1)
    first = manager.table(0).row
    assert manager.reserve(0, 1) and manager.readable(0) == first != manager.table(0).row
    manager.admit(2, [2] * 6)
    manager.reserve(2, 6)
    manager.commit(2, 6, [2] * 6)
    manager.fork(2, 3)
    second = manager.table(2).row
    manager.release(1)  # the shared tail is free, and used next
    assert manager.reserve(2, 1) and manager.table(2).row[1] == first[1]
    assert manager.readable(0) == first and manager.readable(2) == second
    blocks = np.arange(8)
    for old, new in manager.copies():
        blocks[new] = blocks[old]
    assert tuple(blocks[list(manager.table(0).row)]) == first
    assert manager.readable(0) == manager.table(0).row, "the copies were made"


@pytest.mark.parametrize("kind", ["modules", "compiled", "device"])
def test_two_readers_of_one_runner_have_their_own_layers(kind):
    if kind == "compiled" and no_compiler():
        pytest.skip("no C++ compiler")
    model = tiny_models.build("llama3")
    if kind == "modules":
        runner = Modules(model, blocks=4)
    elif kind == "device":
        runner = device_runner(model.config, model.state_dict(), blocks=4)
    else:
        runner = compiled(model.config, model.state_dict(), blocks=4, threads=1)
    first = ContextReader(runner.keep_hidden((1, 3)), 16, (1, 3))
    second = ContextReader(runner.keep_hidden((0, 3)), 16, (0, 3))
    third = ContextReader(runner.keep_hidden((1,)), 16, (1,))
    runner.run(StepInput([5, 6, 7], (TokenSpan(0, 0, 3, (2,), 1),)))
    request = asked(4, (2,))
    (_, a), (_, b), (_, c) = (reader.unread(request) for reader in (first, second, third))
    assert a.shape == b.shape == (3, 2, 64) and c.shape == (3, 1, 64)
    assert torch.equal(a[:, 1], b[:, 1]) and torch.equal(a[:, :1], c) and not torch.equal(a[:, 0], b[:, 0])
    assert all(states.abs().amax(-1).min() > 0.1 for states in (a, b, c))
