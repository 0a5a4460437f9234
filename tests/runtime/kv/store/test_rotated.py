"""int4: the definition in float64, what the shift and the rotation are for, odd sizes and numbers."""

import pytest
import torch

from attar.errors import SettingsError
from attar.kernels.kv_int4 import RANGES, decode, encode, rotated
from attar.runtime.kv.store import PoolGeometry, make_store
from attar.runtime.kv.store.rotated import CacheBasis

CPU = torch.device("cpu")


def hadamard(n):
    """float64 (n, n): on each 2^j numbers, the largest power of two that divides n."""
    h, size = torch.ones(1, 1, dtype=torch.float64), n & -n
    while len(h) < size:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return torch.block_diag(*[h / size**0.5] * (n // size))


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("n", [2, 6, 64, 80, 96])
def test_the_rotation(n):
    x = numbers(5, n)
    torch.testing.assert_close(rotated(x).double(), x.double() @ hadamard(n), rtol=0, atol=1e-5)
    torch.testing.assert_close(rotated(rotated(x)), x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("n", [16, 80])
def test_a_store_against_the_definition(n):
    """Keys y = (x - c) D H, values y = x H; 16 levels from min to max, s and m in float16."""
    store = make_store("int4", PoolGeometry(1, 2, 4, 2, n), CPU)
    store.basis = CacheBasis(numbers(2, 1, 2, n, seed=2) * 3, numbers(1, 2, n, seed=3).exp())
    factors, centers = store.basis.at(0)
    factors = torch.stack((factors, torch.ones(2, n)))[:, :, None].double()
    which = torch.tensor([[0, 1, 0], [1, 0, 0]])  # (heads, tokens)
    c = torch.stack([centers[which[head], head] for head in range(2)], 0)
    k, v, slots = numbers(3, 2, n) + c.transpose(0, 1), numbers(3, 2, n, seed=1), torch.tensor([1, 6, 2])
    store.write_(0, slots, k, v)
    actual = torch.stack(store.read(0, torch.arange(2), torch.float32, range(2)))[:, slots].transpose(1, 2)
    h, c = hadamard(n), torch.stack((c, torch.zeros(2, 3, n))).double()
    y = (torch.stack((k, v)).transpose(1, 2).double() - c) * factors @ h
    low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
    found = []
    for r in RANGES:
        middle, half = (low + high) / 2, r * (high - low) / 2
        m = (middle - half).half().double()
        s = ((middle + half - m) / 15).half().double()
        found.append(((y - m) / s).round().clamp(0, 15) * s + m)
    errors = torch.stack([(one - y).square().sum(-1) for one in found])
    least = errors.argmin(0)
    assert len(least.unique()) > 1
    want = torch.stack(found).gather(0, least[None, ..., None].expand(1, *y.shape))[0] @ h / factors + c
    error = ((actual.double() - want) * factors).abs() @ h.abs()
    assert float(error.median()) < 1e-5 and float(error.max()) < float(s.max()) * n**0.5


def test_a_head_reads_what_it_wrote_from_the_cells_of_another():
    """Eviction moves entries to cells of other layers and heads; their own basis decodes them."""
    store = make_store("int4", PoolGeometry(2, 2, 4, 2, 16), CPU)
    store.basis = CacheBasis(numbers(2, 2, 2, 16, seed=2) * 3, numbers(2, 2, 16, seed=3).exp())
    slots = torch.tensor([1, 6, 2])
    for layer in range(2):
        store.write_(layer, slots, numbers(3, 2, 16, seed=layer), numbers(3, 2, 16, seed=layer + 5))
    want = [kind[slots[:2], 1] for kind in store.read(0, torch.arange(2), torch.float32, range(2))]
    at = [torch.tensor(where) for where in ([0, 0], [1, 6], [1, 1])]
    moved = tuple(torch.tensor(where) for where in ([1, 1], [6, 2], [0, 1]))
    store.move_cells_(tuple(at), moved)
    for cells, kept in zip(store.read_cells(moved, (0, 1), torch.float32), want, strict=True):
        assert torch.equal(cells, kept)


def test_rotation_and_shift_lessen_the_error():
    """A channel that is large in every key: 0.02 of the error by the shift, a fifth by the rotation alone."""
    x = numbers(200, 64)
    x[:, 5] += 40

    def error(shift, turn):
        y = x - shift
        codes = encode(y if turn else rotated(y))  # which encode turns back
        back = decode(*codes)
        return float(((back if turn else rotated(back)) + shift - x).square().mean())

    plain, turned, both = error(0, False), error(0, True), error(x.mean(0), True)
    assert both < 0.02 * plain and both < turned < 0.2 * plain


def test_odd_numbers_stay_finite():
    x = torch.stack((torch.zeros(8), torch.full((8,), 7.0), torch.full((8,), 3e38), torch.eye(8)[0] * 1e-9))
    y = decode(*encode(x))
    assert torch.isfinite(y).all() and torch.equal(y[0], x[0])
    torch.testing.assert_close(y[1], x[1], rtol=1e-3, atol=1e-3)


def test_a_head_of_an_odd_size_is_refused():
    with pytest.raises(SettingsError, match=r"kv_dtype is 'int4'.*7 is no multiple of 2"):
        make_store("int4", PoolGeometry(1, 2, 16, 1, 7), CPU)
