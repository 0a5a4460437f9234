"""The integer grid: parameters, round trips, idempotence, bytes."""

import pytest
import torch

from attar.quantization.grids import IntGrid, QuantizedTensor
from attar.quantization.grids.grid import stored_scale
from attar.quantization.methods.rtn import rtn

GRIDS = [
    IntGrid(bits, group, symmetric, storage)
    for bits in (2, 3, 4, 5, 6, 8)
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


def spelled_out(weight, grid, symmetric):
    """Codes, decoded values and where a code is decided beyond float32's last bits, tile by tile in float64
    with the scale rounded to float32."""
    steps = 2**grid.bits - 1
    codes, decoded = torch.empty(weight.shape), torch.empty(weight.shape, dtype=torch.float64)
    decided = torch.empty(weight.shape, dtype=torch.bool)
    height, width = grid.rows or weight.shape[0], grid.group_size or weight.shape[1]
    for top in range(0, weight.shape[0], height):
        for left in range(0, weight.shape[1], width):
            here = (slice(top, top + height), slice(left, left + width))
            w = weight[here]
            low, high = min(w.min().item(), 0.0), max(w.max().item(), 0.0)
            span = 2 * max(-low, high) if symmetric else high - low
            s = torch.tensor(span / steps, dtype=torch.float32).double()
            z = 0.0 if symmetric else (grid.low - torch.tensor(low) / s).round().clamp(grid.low, grid.high)
            q = (w.double() / s + z).round().clamp(grid.low, grid.high)
            codes[here], decoded[here] = q.float(), s * (q - z)
            decided[here] = ((w.double() / s).frac().abs() - 0.5).abs() > 1e-4
    return codes, decoded, decided


@pytest.mark.few(25)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("rows", [1, 0, 16])
@pytest.mark.parametrize("group", [0, 16, 24])
@pytest.mark.parametrize("symmetric", [True, False])
def test_tiles_of_every_shape_are_what_a_loop_over_them_gives(bits, rows, group, symmetric):
    weight = torch.randn(40, 100, generator=torch.Generator().manual_seed(3))  # ragged both ways
    grid = IntGrid(bits, group, symmetric, rows=rows)
    quantized = rtn(weight, grid)
    codes, decoded, decided = spelled_out(weight, grid, symmetric)
    assert quantized.parameters.scale.shape == grid.tiles((40, 100))
    assert decided.float().mean() > 0.9 and torch.equal(quantized.codes[decided].float(), codes[decided])
    assert torch.allclose(quantized.dequantize()[decided].double(), decoded[decided], rtol=1e-5, atol=1e-6)


def test_blocks_of_128_and_their_ragged_ends():
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(4))
    weight[128:, 256:] *= 100
    quantized = rtn(weight, IntGrid(8, 128, rows=128))
    assert quantized.parameters.scale.shape == (2, 3)
    expected = weight[128:, 256:].abs().max() * 2 / 255
    assert quantized.parameters.scale[1, 2].item() == pytest.approx(expected.item())
    assert IntGrid(8, 128, True, torch.bfloat16, 128).bits_per_weight((200, 300)) == 8 + 16 * 6 / 60000
    rows = quantized.grid.by_row(quantized.parameters, 200)
    assert rows.scale.shape == (200, 3) and torch.equal(rows.scale[199], quantized.parameters.scale[1])


def test_per_tensor_is_one_scale():
    weight = torch.randn(6, 10, generator=torch.Generator().manual_seed(5))
    quantized = rtn(weight, IntGrid(8, 0, rows=0))
    assert quantized.parameters.scale.shape == (1, 1)
    assert quantized.parameters.scale.item() == pytest.approx(weight.abs().max().item() * 2 / 255)


def test_shrink_is_a_factor_on_the_range_of_each_tile(weight):
    grid = IntGrid(4, 64)
    shrink = torch.linspace(0.5, 1.0, 24 * 3).reshape(24, 3)
    whole, less = grid.choose(weight), grid.choose(weight, shrink)
    assert torch.allclose(less.scale, whole.scale * shrink)
    assert torch.allclose(grid.choose(weight, 0.5).scale, whole.scale * 0.5)


def test_tensors_and_back(weight):
    quantized = rtn(weight, IntGrid(3, 32, False, torch.bfloat16))
    again = QuantizedTensor.from_tensors(quantized.grid, quantized.tensors())
    assert torch.equal(again.dequantize(), quantized.dequantize())


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_large_weight_is_coded_in_runs_of_rows_with_the_same_result(symmetric, monkeypatch):
    g = torch.Generator().manual_seed(0)
    large = torch.randn(37, 64, generator=g)
    grid = IntGrid(3, 16, symmetric)
    whole = rtn(large, grid)
    decoded = whole.dequantize()
    monkeypatch.setattr("attar.quantization.grids.grid.CHUNK", 5 * 64)
    assert torch.equal(rtn(large, grid).codes, whole.codes)
    assert torch.equal(whole.dequantize(), decoded)
    monkeypatch.setattr("attar.quantization.grids.grid.CHUNK", 10)  # less than one row
    assert torch.equal(rtn(large, grid).codes, whole.codes)


@pytest.mark.parametrize(("std", "worst"), [(1e-3, 1.02), (1e-4, 1.1), (1e-5, 3.0)])
def test_small_weights_keep_their_precision_in_float16(std, worst):
    """Scales below float16's smallest normal number, 6e-5, are subnormal and not rounded up to it."""
    g = torch.Generator().manual_seed(0)
    W = (torch.randn(16, 512, generator=g) * std).half()
    errors = {}
    for storage in (torch.float16, torch.float32):
        quantized = rtn(W, IntGrid(8, 128, storage=storage))
        exact = quantized.codes * quantized.parameters.scale.repeat_interleave(128, 1)
        errors[storage] = float((exact - W.float()).norm() / W.float().norm())
        assert (quantized.parameters.scale == quantized.parameters.scale.to(storage)).all()
    assert errors[torch.float16] < worst * errors[torch.float32], errors


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16, torch.float32])
def test_the_smallest_scales_are_positive_and_have_a_reciprocal(storage):
    scale = stored_scale(torch.tensor([0.0, 1e-45, 1e-39, 1e-30, 3e-8, 1e-3]), storage)
    assert scale[0] == 1 and (scale > 0).all() and torch.isfinite(1 / scale).all()
    assert torch.equal(scale, scale.to(storage).float())
