"""The float8 grid against torch's own casts."""

import pytest
import torch

from attar.errors import SettingsError
from attar.quantization.grids import Float8Grid
from attar.quantization.methods.rtn import rtn

LARGEST = {"e4m3fn": 448.0, "e5m2": 57344.0}
TYPES = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SHARES = {"channel": (0, 1), "tensor": (0, 0), "group": (32, 1), "block": (128, 128)}


@pytest.fixture(scope="module")
def weight():
    values = torch.randn(200, 320, generator=torch.Generator().manual_seed(0)) * 0.1
    return values * torch.linspace(0.01, 3, 200)[:, None]


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", LARGEST)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_torchs_cast_of_each_tile(weight, kind, share, storage):
    group, rows = SHARES[share]
    quantized = rtn(weight, Float8Grid(kind, group, rows, storage))
    assert quantized.codes.dtype == TYPES[kind]
    height, width = rows or 200, group or 320
    number = torch.finfo(storage)
    least = max(number.tiny * number.eps, torch.finfo(torch.float32).tiny)  # float16 keeps its subnormals
    for i, top in enumerate(range(0, 200, height)):
        for j, left in enumerate(range(0, 320, width)):
            here = (slice(top, top + height), slice(left, left + width))
            scale = weight[here].abs().max() / LARGEST[kind]
            scale = scale.clamp(min=least).to(storage).float()
            assert quantized.parameters.scale[i, j] == scale
            cast = (weight[here] / scale).clamp(-LARGEST[kind], LARGEST[kind]).to(TYPES[kind])
            assert torch.equal(quantized.codes[here].view(torch.uint8), cast.view(torch.uint8))
            assert torch.equal(quantized.dequantize()[here], (cast.float() * scale).to(storage).float())


@pytest.mark.parametrize("kind", LARGEST)
def test_every_float8_is_its_own_nearest_and_larger_values_saturate(kind):
    grid = Float8Grid(kind)
    every = torch.arange(256, dtype=torch.uint8).view(TYPES[kind])
    finite = every[every.float().isfinite()]
    assert torch.equal(grid.nearest(finite.float()), finite.float())
    assert torch.equal(grid.level(finite), finite.float())
    beyond = grid.nearest(torch.tensor([1e30, -1e30, LARGEST[kind] * 1.2]))
    assert beyond.tolist() == [LARGEST[kind], -LARGEST[kind], LARGEST[kind]]


def test_the_largest_weight_of_a_tile_keeps_its_value_under_a_float32_scale(weight):
    quantized = rtn(weight, Float8Grid("e4m3fn", 0, 1))
    largest = weight.abs().argmax(1, keepdim=True)
    assert torch.allclose(quantized.dequantize().gather(1, largest), weight.gather(1, largest), rtol=1e-6)


def test_relative_error_is_at_most_half_a_step_of_the_mantissa(weight):
    for kind, bits in (("e4m3fn", 3), ("e5m2", 2)):
        quantized = rtn(weight, Float8Grid(kind, 0, 1))
        spread = quantized.parameters.scale
        smallest = torch.finfo(TYPES[kind]).tiny * spread
        normal = weight.abs() > smallest
        error = (quantized.dequantize() - weight).abs()
        assert (error[normal] <= weight.abs()[normal] * 2.0 ** (-bits - 1) * 1.001).all()


def test_bits_per_weight():
    assert Float8Grid("e4m3fn", 0, 1, torch.bfloat16).bits_per_weight((64, 256)) == 8 + 16 / 256
    assert Float8Grid("e4m3fn", 0, 0).bits_per_weight((64, 256)) == 8 + 32 / (64 * 256)
    assert Float8Grid("e4m3fn", 128, 128).bits_per_weight((256, 300)) == 8 + 32 * 6 / (256 * 300)


def test_unknown_kind_is_named():
    with pytest.raises(SettingsError, match="e4m3fn or e5m2"):
        Float8Grid("e3m4")
