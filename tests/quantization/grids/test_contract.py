"""What every grid owes: the same questions to all of them."""

import pytest
import torch

from attar.quantization.grids import (
    GGML,
    Float8Grid,
    IntGrid,
    MXFP4Grid,
    MXFP8Grid,
    NF4Grid,
    NVFP4Grid,
    QuantizedTensor,
)
from attar.quantization.hessian import output_error
from attar.quantization.methods.gptq import gptq
from attar.quantization.methods.rtn import rtn

GRIDS = [
    IntGrid(4, 64),
    IntGrid(2, 32, False, torch.bfloat16),
    IntGrid(8, 0),
    IntGrid(8, 0, rows=0),
    IntGrid(5, 128, False, rows=128),
    Float8Grid("e4m3fn", 0, 1, torch.bfloat16),
    Float8Grid("e4m3fn", 128, 128),
    Float8Grid("e5m2", 0, 0),
    Float8Grid("e5m2", 32),
    NF4Grid(64),
    NF4Grid(64, double=True, storage=torch.bfloat16),
    NVFP4Grid(torch.bfloat16),
    MXFP4Grid(),
    MXFP8Grid(),
    *GGML.values(),
]
N, K = 40, 256


@pytest.fixture(scope="module")
def weight():
    return torch.randn(N, K, generator=torch.Generator().manual_seed(0)) * 0.05


@pytest.fixture(scope="module")
def hessian():
    x = torch.randn(1024, K, generator=torch.Generator().manual_seed(1))
    x = x @ torch.randn(K, K, generator=torch.Generator().manual_seed(2)) / 8 + x
    return 2 * x.T @ x / 1024


def every_code(grid):
    """All codes of a grid, float32."""
    if isinstance(grid, Float8Grid):
        values = torch.arange(256, dtype=torch.uint8).view(grid.code_dtype).float()
        return values[values.isfinite()]
    if isinstance(grid, IntGrid):
        return torch.arange(grid.low, grid.high + 1.0)
    if grid in GGML.values():
        return torch.arange(grid.layout.low, grid.layout.high + 1.0)
    return torch.arange(16.0)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_code_is_nearest_to_its_own_level(grid):
    codes = every_code(grid)
    assert torch.equal(grid.nearest(grid.level(codes)), codes)
    assert torch.equal(grid.level(codes.to(grid.code_dtype)), grid.level(codes))
    assert (grid.nearest(torch.tensor([-1e30, 1e30])).to(grid.code_dtype).float().abs() < 1e6).all()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_nearest_is_nearest_by_brute_force(grid):
    codes = every_code(grid)
    levels = grid.level(codes).double()
    generator = torch.Generator().manual_seed(4)
    values = (torch.rand(2000, generator=generator) * 2.2 - 1.1) * float(levels.abs().max())
    values = torch.cat([values, values / 64])
    reached = (grid.level(grid.nearest(values)).double() - values).abs()
    least = (levels - values.double()[:, None]).abs().amin(1)
    assert torch.allclose(reached, least, rtol=1e-5, atol=1e-6 * float(levels.abs().max()))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_round_trip_shapes_types_and_error(grid, weight):
    before = weight.clone()
    quantized = rtn(weight, grid)
    assert torch.equal(weight, before)
    assert quantized.codes.shape == (N, K) and quantized.codes.dtype == grid.code_dtype
    assert quantized.parameters.scale.shape == grid.tiles((N, K))
    assert quantized.parameters.scale.dtype == torch.float32
    decoded = quantized.dequantize()
    assert decoded.dtype == torch.float32
    assert torch.equal(decoded, decoded.to(grid.storage).float())
    relative = (decoded - weight).square().sum() / weight.square().sum()
    # a uniform code of b bits over a bell of 6 deviations errs by about 3 * 4^-b
    assert relative < 12 * 4.0 ** -min(grid.bits_per_weight((N, K)), 5)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_decoded_weight_has_the_same_codes(grid, weight):
    quantized = rtn(weight, grid)
    rows = grid.by_row(quantized.parameters, N)
    at = rows.column(torch.arange(K) // (grid.group_size or K))
    decoded = grid.decode(quantized.codes, at)
    assert torch.equal(grid.encode(decoded, at).to(grid.code_dtype).float(), quantized.codes.float())
    assert torch.equal(grid.quantize(decoded, quantized.parameters).codes.float(), quantized.codes.float())


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_columns_are_encoded_as_the_whole_is(grid, weight):
    quantized = rtn(weight, grid)
    rows = grid.by_row(quantized.parameters, N)
    for column in (0, 17, K - 1):
        at = rows.column(column // (grid.group_size or K))
        codes = grid.encode(weight[:, column], at)
        assert torch.equal(codes.to(grid.code_dtype).float(), quantized.codes[:, column].float())
        values = grid.decode(codes, at).to(grid.storage).float()
        assert torch.equal(values, quantized.dequantize()[:, column])


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_bf16_weights_zeros_and_one_row(grid, weight):
    half = rtn(weight.bfloat16(), grid)
    assert torch.equal(half.dequantize(), rtn(weight.bfloat16().float(), grid).dequantize())
    zeros = rtn(torch.zeros(N, K), grid)
    least = 0.0 if (grid.level(every_code(grid)) == 0).any() else 2.0**-24  # a format may lack a level 0
    assert (zeros.dequantize().abs() <= least).all()
    assert torch.isfinite(zeros.parameters.scale).all() and (zeros.parameters.scale != 0).all()
    part = weight.clone()
    part[3] = 0.0
    assert (rtn(part, grid).dequantize()[3].abs() <= 1e-6).all()
    assert rtn(weight[:1], grid).dequantize().shape == (1, K)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_saved_and_read_back(grid, weight, tmp_path):
    from safetensors.torch import load_file, save_file

    quantized = rtn(weight, grid)
    save_file(quantized.tensors(), tmp_path / "codes.safetensors")
    again = QuantizedTensor.from_tensors(grid, load_file(tmp_path / "codes.safetensors"))
    assert torch.equal(again.dequantize(), quantized.dequantize())
    assert again.parameters.stored.keys() == quantized.parameters.stored.keys()


def stored_bits(grid, made):
    """Bits of what a file holds, counted from its tensors."""
    stored = dict(made.parameters.stored)
    stored.pop("nested_map", None)  # a constant of the format
    if isinstance(grid, Float8Grid):
        code = 8
    elif isinstance(grid, IntGrid):
        code = grid.bits
    else:
        code = int(grid.kind.removeprefix("I")[1]) if grid in GGML.values() else 4
    bits = code * made.codes.numel()
    if not stored:
        item = 4 if isinstance(grid, NF4Grid) else grid.storage.itemsize
        bits += 8 * item * made.parameters.scale.numel()
        bits += 0 if made.parameters.zero is None else code * made.parameters.zero.numel()
    for name, value in stored.items():
        narrow = {"Q2_K": 4, "Q3_K": 6, "Q4_K": 6, "Q5_K": 6, "IQ4_XS": 6}.get(getattr(grid, "kind", ""), 8)
        wide = narrow if name in ("scale_codes", "minimum_codes") else 8 * value.element_size()
        bits += wide * value.numel()
    return bits


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_bits_per_weight_count_what_is_stored(grid, weight):
    quantized = rtn(weight, grid)
    assert grid.bits_per_weight((N, K)) * N * K == pytest.approx(stored_bits(grid, quantized), rel=1e-12)


@pytest.mark.few(10)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_gptq_runs_on_it_and_beats_nearest(grid, weight, hessian):
    quantized = gptq(weight, hessian, grid)
    assert quantized.quantized.codes.dtype == grid.code_dtype
    nearest = rtn(weight, grid, quantized.quantized.parameters)
    errors = [output_error(weight, one.dequantize(), hessian) for one in (quantized.quantized, nearest)]
    assert errors[0] < errors[1]
