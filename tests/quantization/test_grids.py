"""The integer grid: parameters, round trips, idempotence, bytes."""

import pytest
import torch

from attar.quantization.grids import IntGrid
from attar.quantization.rtn import rtn

GRIDS = [
    IntGrid(bits, group, symmetric, storage)
    for bits in (2, 3, 4, 8)
    for group in (0, 32, 64)
    for symmetric in (True, False)
    for storage in (torch.float32, torch.bfloat16)
]


@pytest.fixture(scope="module")
def weight():
    return torch.randn(24, 192, generator=torch.Generator().manual_seed(0)) * 0.1


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_error_is_at_most_half_a_step(grid, weight):
    quantized = rtn(weight, grid)
    step = quantized.parameters.scale.repeat_interleave(192 // quantized.parameters.scale.shape[1], 1)
    error = (quantized.dequantize() - weight).abs()
    # symmetric grids lose the half step beyond the top code, asymmetric ones the rounding of zero and scale
    assert (error <= step * (0.505 if grid.symmetric else 1.01) + weight.abs() * 2**-7).all()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_codes_stay_in_range_and_zero_stays_zero(grid, weight):
    weight = weight.clone()
    weight[3] = 0.0
    weight[5, :32] = 0.0
    quantized = rtn(weight, grid)
    assert quantized.codes.min() >= grid.low and quantized.codes.max() <= grid.high
    assert (quantized.dequantize()[3] == 0).all()
    assert torch.isfinite(quantized.dequantize()).all()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_rounding_a_rounded_weight_with_its_own_parameters_changes_nothing(grid, weight):
    quantized = rtn(weight, grid)
    groups = quantized.parameters.scale.shape[1]
    spread = quantized.parameters.column(torch.arange(192) // (192 // groups))
    once = grid.decode(quantized.codes.float(), spread)
    assert torch.equal(grid.encode(once, spread).to(torch.int8), quantized.codes)


def test_symmetric_scale_is_the_range_over_the_steps():
    weight = torch.tensor([[0.75, -0.1, 0.2, 0.0]])
    quantized = rtn(weight, IntGrid(4, 0))
    assert quantized.parameters.scale.item() == pytest.approx(0.75 * 2 / 15)
    assert quantized.codes.tolist() == [
        [7, -1, 2, 0]
    ]  # 0.75 / 0.1 = 7.5 rounds to even 8 and is clipped to 7


def test_asymmetric_range_reaches_both_ends():
    weight = torch.linspace(-0.3, 0.9, 64)[None]
    quantized = rtn(weight, IntGrid(4, 64, symmetric=False))
    assert quantized.codes.min() == -8 and quantized.codes.max() == 7
    assert (quantized.dequantize() - weight).abs().max() <= quantized.parameters.scale.max() * 0.51


def test_bits_per_weight_counts_scales_and_zeros():
    assert IntGrid(4, 128, True, torch.bfloat16).bits_per_weight((8, 256)) == 4.125
    assert IntGrid(4, 32, False, torch.bfloat16).bits_per_weight((8, 256)) == 4 + 20 / 32
    assert IntGrid(8, 0, True, torch.bfloat16).bits_per_weight((8, 256)) == 8 + 16 / 256


def test_input_is_not_touched_and_bf16_is_accepted(weight):
    before = weight.clone()
    rtn(weight, IntGrid(4, 32))
    assert torch.equal(weight, before)
    half = rtn(weight.bfloat16(), IntGrid(4, 32))
    assert torch.equal(half.codes, rtn(weight.bfloat16().float(), IntGrid(4, 32)).codes)
