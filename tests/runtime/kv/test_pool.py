"""The pool: block tables, windows, copies, what counts as final."""

import pytest
import torch

from attar.runtime.kv.memory import LayerShape, block_bytes
from attar.runtime.kv.pool import KVPool, committed
from attar.runtime.kv.store import STORES, PoolGeometry
from attar.runtime.step import StepInput, TokenSpan

GEOMETRY = PoolGeometry(layers=2, blocks=8, block_size=4, kv_heads=2, head_dim=8)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_sequence_is_read_through_its_block_table():
    pool = KVPool(GEOMETRY)
    k, v = numbers(10, 2, 8), numbers(10, 2, 8, seed=1)
    blocks = (6, 1, 3)
    slots = pool.begin(StepInput(range(10), (TokenSpan(0, 0, 10, blocks),)))
    assert slots.tolist() == [24, 25, 26, 27, 4, 5, 6, 7, 12, 13]
    pool.write(1, slots, k, v)
    for start, stop in ((0, 10), (0, 4), (3, 9), (5, 6), (4, 8)):
        got_k, got_v = pool.gather(1, blocks, stop, start)
        assert torch.equal(got_k, k[start:stop]) and torch.equal(got_v, v[start:stop])
    assert torch.equal(pool.gather(1, (-1, 1, 3), 10, 6)[0], k[6:])  # a hole that is not looked at
    assert not pool.gather(0, blocks, 10)[0].any()  # the other layer


def test_copies_come_first_and_in_order():
    pool = KVPool(GEOMETRY)
    k, v = numbers(8, 2, 8), numbers(8, 2, 8, seed=1)
    pool.write(0, pool.begin(StepInput(range(8), (TokenSpan(0, 0, 8, (0, 1)),))), k, v)
    slots = pool.begin(StepInput([0], (TokenSpan(1, 6, 7, (0, 5)),), copies=((1, 5), (5, 7))))
    pool.write(0, slots, k[:1], v[:1])
    assert torch.equal(pool.gather(0, (0, 5), 7)[0], torch.cat([k[:6], k[:1]]))
    assert torch.equal(pool.gather(0, (0, 7), 8)[0], k)
    assert torch.equal(pool.gather(0, (0, 1), 8)[0], k)


@pytest.mark.parametrize(
    ("span", "tree", "want"),
    [
        (TokenSpan(0, 0, 10, (0, 1, 2), wants=0), False, 10),  # a chunk
        (TokenSpan(0, 9, 10, (0, 1, 2), wants=1), False, 10),  # decoding
        (TokenSpan(0, 9, 12, (0, 1, 2), wants=3), False, 10),  # the last token and two drafts
        (TokenSpan(0, 9, 12, (0, 1, 2), wants=3), True, 9),
        (TokenSpan(0, 90, 91, (0, 1, 2), wants=1, kept=8), False, 9),  # packed by eviction
    ],
)
def test_what_no_rejected_draft_can_take_back(span, tree, want):
    assert committed(span, tree) == want


def test_kivi_packs_only_what_is_committed():
    pool = KVPool(PoolGeometry(2, 4, 32, 2, 8), "kivi4")
    k, v = numbers(40, 2, 8), numbers(40, 2, 8, seed=1)

    def run(start, stop, wants):
        step = StepInput(range(stop - start), (TokenSpan(0, start, stop, (2, 0), wants),))
        slots = pool.begin(step)
        for layer in range(2):
            pool.write(layer, slots, k[start:stop], v[start:stop])
        pool.end(step)

    run(0, 30, 1)
    run(30, 36, 6)  # five drafts: token 31 may be taken back
    assert torch.equal(pool.gather(0, (2, 0), 36)[0], k[:36])
    run(31, 33, 2)  # they were; token 31 is committed now
    actual = pool.gather(0, (2, 0), 33)[0]
    assert not torch.equal(actual[:32], k[:32]) and torch.equal(actual[32:], k[32:33])
    torch.testing.assert_close(actual[:32], k[:32], atol=0.25, rtol=0)


def test_gather_returns_the_dtype_of_the_model():
    pool = KVPool(GEOMETRY, "int8", dtype=torch.bfloat16)
    pool.write(0, torch.tensor([0]), numbers(1, 2, 8).bfloat16(), numbers(1, 2, 8).bfloat16())
    assert pool.gather(0, (0,), 1)[0].dtype == torch.bfloat16
    assert pool.nbytes == 2 * 2 * 8 * 4 * 2 * (8 + 4)


@pytest.mark.parametrize("name", STORES)
def test_bytes_are_those_of_the_calculator(name):
    for kv_heads, head_dim in ((2, 8), (1, 64), (3, 96)):
        geometry = PoolGeometry(layers=3, blocks=5, block_size=32, kv_heads=kv_heads, head_dim=head_dim)
        want = 5 * block_bytes([LayerShape(kv_heads, head_dim)] * 3, name, 32)
        assert KVPool(geometry, name).nbytes == want
