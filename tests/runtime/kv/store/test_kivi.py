"""KIVI: the formula, what stays exact until when, blocks copied, taken back and quantized early."""

import pytest
import torch

from attar.kernels.kv_codes import packed, unpacked
from attar.runtime.kv.store.kivi import KIVIStore, quantize
from attar.runtime.kv.store.planes import PoolGeometry

CPU = torch.device("cpu")
GEOMETRY = PoolGeometry(layers=2, blocks=8, block_size=64, kv_heads=2, head_dim=64)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fill(store, slots, k, v):
    store.begin_(slots.tolist())
    for layer in range(store.geometry.layers):
        store.write_(layer, slots, k, v)


def read(store, block):
    return store.read(1, torch.tensor([block]), torch.float32, [block])


@pytest.mark.parametrize("bits", [2, 4])
def test_pack_and_unpack(bits):
    q = torch.randint(0, 2**bits, (3, 5, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    codes = packed(q, bits)
    assert codes.shape == (3, 5, bits) and codes.dtype == torch.uint8
    assert torch.equal(unpacked(codes, bits), q.float())


def test_quantize_by_hand():
    x = torch.tensor([[-1.0, 0.0, 0.4, 2.0], [3.0, 3.0, 3.0, 3.0]])
    q, s, m = quantize(x, -1, 2)
    assert (s.tolist(), m.tolist()) == ([[1.0], [0.0]], [[-1.0], [3.0]])
    assert q.tolist() == [[0, 1, 1, 3], [0, 0, 0, 0]]


@pytest.mark.parametrize("bits", [2, 4])
def test_keys_by_channel_and_values_by_token(bits):
    """A channel 50 times larger does no harm to other channels of keys, nor a token to other values."""
    k, v = numbers(64, 2, 64), numbers(64, 2, 64, seed=1)
    k[:, :, 7] *= 50
    v[5] *= 50
    store = KIVIStore(GEOMETRY, bits, CPU)
    fill(store, torch.arange(64, 128), k, v)
    store.settle_([1])
    got_k, got_v = read(store, 1)
    top = 2**bits - 1
    for got, x, dims in ((got_k, k.view(2, 32, 2, 64), 1), (got_v, v.view(64, 2, 2, 32), 3)):
        s = (x.amax(dims, keepdim=True) - x.amin(dims, keepdim=True)) / top
        error = (got.view(x.shape) - x).abs()
        assert (error <= s * (0.5 + 0.02) + 1e-3).all()  # half a step, and what float16 takes
        assert (error.amax(dims, keepdim=True) > 0.2 * s).all()


def test_a_block_is_exact_until_it_is_settled_and_read_only_after():
    store = KIVIStore(GEOMETRY, 4, CPU)
    k, v = numbers(64, 2, 64), numbers(64, 2, 64, seed=1)
    for start in range(0, 64, 16):
        fill(store, torch.arange(start, start + 16), k[start : start + 16], v[start : start + 16])
        assert torch.equal(read(store, 0)[0][: start + 16], k[: start + 16])
    held = store.nbytes
    store.settle_([0])
    once = read(store, 0)
    assert not torch.equal(once[0], k) and store.nbytes == held - 2 * 2 * 64 * 2 * 64 * 4
    fill(store, torch.arange(64, 70), k[:6], v[:6])
    store.settle_([0])
    assert all(torch.equal(a, b) for a, b in zip(once, read(store, 0), strict=True))


def test_a_copy_of_a_partial_block_goes_its_own_way():
    store = KIVIStore(GEOMETRY, 4, CPU)
    k, v = numbers(64, 2, 64), numbers(64, 2, 64, seed=1)
    fill(store, torch.arange(10), k[:10], v[:10])
    store.copy_([(0, 3)])
    fill(store, torch.arange(10, 20), k[10:20], v[10:20])
    fill(store, torch.arange(3 * 64 + 10, 3 * 64 + 20), k[30:40], v[30:40])
    assert torch.equal(read(store, 0)[0][:20], k[:20])
    assert torch.equal(read(store, 3)[0][:20], torch.cat([k[:10], k[30:40]]))


def test_a_settled_block_can_be_copied_and_written_over():
    """Truncation into a full block: the rest of it goes on from what was quantized."""
    store = KIVIStore(GEOMETRY, 4, CPU)
    k, v = numbers(64, 2, 64), numbers(64, 2, 64, seed=1)
    fill(store, torch.arange(64), k, v)
    store.settle_([0])
    store.copy_([(0, 5)])
    before = read(store, 5)
    fill(store, torch.arange(5 * 64 + 60, 6 * 64), k[:4], v[:4])
    assert torch.equal(read(store, 5)[0][:60], before[0][:60])
    assert torch.equal(read(store, 5)[0][60:], k[:4])
    assert torch.equal(read(store, 0)[0], before[0])


def test_a_block_used_again_shows_nothing_of_what_it_held():
    store = KIVIStore(GEOMETRY, 4, CPU)
    k, v = numbers(64, 2, 64), numbers(64, 2, 64, seed=1)
    fill(store, torch.arange(40), k[:40], v[:40])  # freed while partial
    fill(store, torch.arange(64), v, k)
    assert torch.equal(read(store, 0)[0], v)
    store.settle_([0])
    fill(store, torch.arange(3), k[:3], v[:3])  # freed when full
    assert torch.equal(read(store, 0)[0][:3], k[:3])


def test_beyond_the_residuals_the_oldest_is_quantized_early():
    store = KIVIStore(GEOMETRY, 4, CPU, residuals=2)
    k, v = numbers(64, 2, 64), numbers(64, 2, 64, seed=1)
    for block in (4, 2, 6):
        fill(store, torch.arange(30) + block * 64, k[:30], v[:30])
    assert list(store.open) == [2, 6]
    error = (read(store, 4)[0][:30] - k[:30]).abs().max().item()
    assert 0 < error < 0.4
    fill(store, torch.arange(30, 64) + 4 * 64, k[30:], v[30:])  # goes on: opened again
    assert torch.equal(read(store, 4)[0][30:], k[30:])
    assert list(store.open) == [6, 4]


def test_a_step_may_open_more_blocks_than_residuals():
    store = KIVIStore(GEOMETRY, 4, CPU, residuals=1)
    k, v = numbers(256, 2, 64), numbers(256, 2, 64, seed=1)
    fill(store, torch.arange(256), k, v)
    assert torch.equal(store.read(0, torch.arange(4), torch.float32, range(4))[0], k)
