"""Every store against a dictionary: slot -> what was written, rounded by the format's own rule."""

import random

import pytest
import torch

from attar.errors import SettingsError
from attar.kernels.kv_codes import encode
from attar.runtime.kv.store import STORES, PoolGeometry, make_store

GEOMETRY = PoolGeometry(layers=2, blocks=6, block_size=32, kv_heads=3, head_dim=16)
CPU = torch.device("cpu")
TOLERANCE = {  # of numbers from a normal distribution, 16 to a head; largest error
    "float32": 0.0,
    "bfloat16": 0.02,
    "float16": 0.002,
    "int8": 0.02,
    "fp8": 0.15,
    "int4": 0.6,
    "mixed": 0.6,
    "kivi4": 0.25,
    "kivi2": 1.1,
}
KINDS = [*STORES, "mixed"]
ALONE = [name for name in KINDS if "kivi" not in name]  # a token is in its final form when it is written


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def store_of(name):
    """mixed: a layer of int8 and one of int4."""
    return (
        make_store("int4", GEOMETRY, CPU, ("int8", "int4"))
        if name == "mixed"
        else make_store(name, GEOMETRY, CPU)
    )


def test_the_tolerances_name_every_store():
    assert set(TOLERANCE) == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_written_is_read(name):
    """Two blocks, filled in three writes of odd lengths, packed where the format packs."""
    store = store_of(name)
    k, v = numbers(64, 3, 16), numbers(64, 3, 16, seed=1)
    slots = torch.cat([torch.arange(96, 128), torch.arange(32, 64)])  # blocks 3, 1
    for start, stop in ((0, 5), (5, 40), (40, 64)):
        store.begin_(slots[start:stop].tolist())
        for layer in range(2):
            store.write_(layer, slots[start:stop], k[start:stop] + layer, v[start:stop] - layer)
    store.settle_([3, 1])
    for layer in range(2):
        got_k, got_v = store.read(layer, torch.tensor([3, 1]), torch.float32, [3, 1])
        assert got_k.shape == (64, 3, 16) and got_k.dtype == torch.float32
        for got, want in ((got_k, k + layer), (got_v, v - layer)):
            error = (got - want).abs().max().item()
            assert error <= TOLERANCE[name] and (error > 0 or name == "float32")


@pytest.mark.few(3)
@pytest.mark.parametrize("name", KINDS)
def test_against_a_dictionary(name):
    """Random appends to sequences, copies of blocks, settling: what was read once settled never changes."""
    draw = random.Random(5)
    store, plain = store_of(name), store_of("float32")
    fill, final = [0] * 6, {}  # tokens of each block; what a settled block read as
    for turn in range(60):
        block = draw.randrange(6)
        if fill[block] == 32 and turn % 3:
            store.settle_([block])
            final.setdefault(block, store.read(1, torch.tensor([block]), torch.float32, [block]))
        elif fill[block] == 32:
            target = draw.randrange(6)
            for one in (store, plain):
                one.copy_([(block, target)])
            fill[target] = 32
            final.pop(target, None)
            if target != block and block in final:
                final[target] = final[block]
        else:
            stop = min(32, fill[block] + draw.randint(1, 20))
            slots = torch.arange(fill[block], stop) + 32 * block
            k, v = numbers(len(slots), 3, 16, seed=turn), numbers(len(slots), 3, 16, seed=turn + 100)
            for one in (store, plain):
                one.begin_(slots.tolist())
                for layer in range(2):
                    one.write_(layer, slots, k, v)
            fill[block] = stop
        for block in range(6):
            for got, want in zip(
                store.read(1, torch.tensor([block]), torch.float32, [block]),
                plain.read(1, torch.tensor([block]), torch.float32, [block]),
                strict=True,
            ):
                assert ((got - want)[: fill[block]].abs() <= TOLERANCE[name]).all(), (turn, block)
            if block in final:
                again = store.read(1, torch.tensor([block]), torch.float32, [block])
                assert all(torch.equal(one, two) for one, two in zip(again, final[block], strict=True))
    assert final and min(fill) > 0


@pytest.mark.parametrize("name", ALONE)
def test_heads_keep_places_of_their_own(name):
    """Each head's kept tokens move to the front of the sequence, bit for bit."""
    store = store_of(name)
    slots = torch.cat([torch.arange(64, 96), torch.arange(0, 32)])
    k, v = numbers(64, 3, 16), numbers(64, 3, 16, seed=1)
    store.begin_(slots.tolist())
    for layer in range(2):
        store.write_(layer, slots, k, v)
    before, other = (store.read(layer, torch.tensor([2, 0]), torch.float32, [2, 0]) for layer in range(2))
    keep = torch.tensor([[0, 3, 40, 63], [1, 2, 3, 4], [60, 61, 62, 63]])
    store.move_(0, slots[keep], slots[:4])
    for was, now in zip(before, store.read(0, torch.tensor([2]), torch.float32, [2]), strict=True):
        for head in range(3):
            assert torch.equal(now[:4, head], was[keep[head], head])
        assert torch.equal(now[4:], was[4:32])  # what lies behind is not touched
    for was, now in zip(other, store.read(1, torch.tensor([2, 0]), torch.float32, [2, 0]), strict=True):
        assert torch.equal(was, now)  # nor is another layer


def test_int8_against_the_formula():
    x = torch.tensor([[1.0, -2.54, 0.013, 0.0], [0.0, 0.0, 0.0, 0.0]])
    q, s = encode(x, torch.int8)
    assert s.flatten().tolist() == pytest.approx([0.02, 1e-6])
    assert q.tolist() == [[50, -127, 1, 0], [0, 0, 0, 0]]


def test_fp8_reaches_its_largest_and_never_overflows():
    x = torch.tensor([[1e4, -3.0, 2e-3, 0.0]], dtype=torch.bfloat16)
    q, s = encode(x, torch.float8_e4m3fn)
    assert q.float().tolist()[0][0] == 448.0 and torch.isfinite(q.float()).all()
    assert (q.float() * s)[0, 0].item() == pytest.approx(float(x[0, 0]), rel=1e-6)


def test_int8_beats_fp8_on_smooth_rows_and_loses_with_outliers():
    def error(x, code):
        q, s = encode(x, code)
        return ((q.float() * s - x)[:, 1:] ** 2).mean().item()

    smooth, rough = numbers(200, 64), numbers(200, 64)
    rough[:, 0] = 60.0
    assert error(smooth, torch.int8) < error(smooth, torch.float8_e4m3fn)
    assert error(rough, torch.int8) > error(rough, torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        *(
            ("float32", 64),
            ("bfloat16", 32),
            ("float16", 32),
            ("int8", 16 + 4),
            ("fp8", 16 + 4),
            ("int4", 8 + 4),
            ("mixed", ((8 + 4) + (16 + 4)) / 2),
        ),
        *(("kivi4", ((8 + 2) + (8 + 4)) / 2), ("kivi2", ((4 + 2) + (4 + 4)) / 2)),
    ],
)
def test_bytes(name, token_bytes):
    """Bytes of a token and head; KIVI: 4 bytes for 32 tokens of a channel, or 16 channels of a token."""
    store = store_of(name)
    tokens = 2 * 6 * 32
    assert store.nbytes == tokens * 3 * 2 * token_bytes


def test_unknown_names_and_shapes_that_do_not_fit():
    with pytest.raises(SettingsError, match=r"kv_dtype is 'int9'.*did you mean int8"):
        make_store("int9", GEOMETRY, CPU)
    with pytest.raises(SettingsError, match=r"block_size is 16.*multiple of 32 with kivi4"):
        make_store("kivi4", PoolGeometry(1, 2, 16, 1, 16), CPU)
    with pytest.raises(SettingsError, match=r"kv_dtype is 'kivi2'.*6 is no multiple of 4"):
        make_store("kivi2", PoolGeometry(1, 2, 32, 1, 6), CPU)
