"""Codes of a checkpoint in the kernels' words: the numbers that a product sees are those of the format."""

import itertools

import pytest
import torch

from attar.formats.coded import UniformWeight
from attar.kernels.packed import unpack
from attar.kernels.product import ThreadPool
from attar.runtime.runner.codes import codes_of, fused
from attar.runtime.runner.compiled_weights import _joined
from attar.runtime.runner.packed_model import PackedLinear
from tests.formats.test_coded import values

ROWS, COLUMNS = 40, 384


def weight(bits, width=128, *, zeros=False, order=None, seed=0, rows=ROWS, columns=COLUMNS):
    """Random codes, scales that bfloat16 holds, whole zeros."""
    generator = torch.Generator().manual_seed(seed)
    low, groups = -(1 << bits - 1), -(-columns // width)
    codes = torch.randint(low, -low, (rows, columns), generator=generator, dtype=torch.int8)
    scale = (torch.rand(rows, groups, generator=generator) + 0.1).bfloat16().float()
    zero = torch.randint(low, -low, (rows, groups), generator=generator).float() if zeros else None
    return UniformWeight(codes, bits, scale, zero, width, order)


def seen(codes, columns=COLUMNS):
    """The weight that a product multiplies with, inputs in their order."""
    actual = unpack(codes.pack())
    if codes.order is None:
        return actual
    return actual[:, torch.argsort(codes.order)]


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_every_width_of_codes(bits, zeros):
    weights = weight(bits, zeros=zeros)
    codes = codes_of(weights)
    assert codes.kind == ("int4" if bits <= 4 else "int8") and (codes.zeros is not None) == zeros
    assert torch.equal(seen(codes), values(weights))


@pytest.mark.parametrize(
    ("width", "group"), [(32, 32), (64, 64), (96, 32), (128, 128), (192, 64), (384, 128)]
)
def test_groups(width, group):
    codes = codes_of(weight(4, width, zeros=True))
    assert codes.group == group
    assert torch.equal(seen(codes), values(weight(4, width, zeros=True)))


def test_rows_that_share_a_scale():
    weights = weight(4)
    shared = UniformWeight(weights.codes, 4, weights.scale[:2], None, 128)  # tiles of 20 rows
    wanted = values(UniformWeight(weights.codes, 4, weights.scale[:2].repeat_interleave(20, 0), None, 128))
    assert torch.equal(seen(codes_of(shared)), wanted)


def test_groups_that_no_kernel_has():
    assert codes_of(weight(4, 24)) is None
    ragged = torch.arange(COLUMNS) // 128
    ragged[100] = 2
    assert codes_of(weight(4, order=ragged)) is None


def test_inputs_in_any_order():
    """GPTQ's act-order: the product of sorted inputs and sorted columns is that of the weight."""
    order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(3)) // 128
    weights = weight(4, zeros=True, order=order)
    codes = codes_of(weights)
    assert torch.equal(seen(codes), values(weights))
    x = torch.randint(-127, 128, (3, COLUMNS), generator=torch.Generator().manual_seed(4)).float()
    x[:, codes.order[::32]] = 127.0  # so that rounding a group to int8 changes nothing
    with ThreadPool(1) as team:
        y = PackedLinear(codes, torch.ones(ROWS), team)(x)
    torch.testing.assert_close(y, x @ values(weights).T + 1, rtol=1e-4, atol=1e-2)


def test_fused_rows_keep_their_numbers():
    kinds = [weight(4, 128), weight(3, 64, zeros=True, seed=1), weight(8, 32, seed=2), weight(6, 384, seed=3)]
    for first, second in itertools.permutations(kinds, 2):
        joined = fused([codes_of(first), codes_of(second)])
        assert joined.kind == ("int8" if max(first.bits, second.bits) > 4 else "int4")
        assert torch.equal(unpack(joined.pack()), torch.cat([values(first), values(second)]))


def test_rows_whose_inputs_are_sorted_differently_are_not_fused():
    orders = [torch.arange(COLUMNS).flip(0) // 128, torch.arange(COLUMNS) // 128]
    one, other = (codes_of(weight(4, order=order)) for order in orders)
    assert fused([one, one]) is not None
    assert fused([one, other]) is None and fused([one, codes_of(weight(4))]) is None


def test_inputs_are_not_changed():
    weights = weight(4, 64, zeros=True)
    before = [code.clone() for code in (weights.codes, weights.scale, weights.zero)]
    fused([codes_of(weights), codes_of(weight(8, 32))]).pack()
    assert all(map(torch.equal, before, (weights.codes, weights.scale, weights.zero)))


def test_biases_of_fused_rows():
    assert _joined([None, None], [3, 2], slice(None)) is None
    biases = [None, torch.tensor([1, 2]).half()]
    assert _joined(biases, [3, 2], slice(None)).tolist() == [0, 0, 0, 1, 2]
    assert _joined(biases, [3, 2], torch.tensor([4, 0, 3])).tolist() == [2, 0, 1]
