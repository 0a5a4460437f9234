"""EXL2's grid: what every grid owes, several bits side by side, scales against brute force."""

import pytest
import torch

from attar.errors import SettingsError
from attar.formats import exl2 as exl2_format
from attar.quantization.grids import QuantizedTensor
from attar.quantization.grids.exl2 import EXL2Grid, bounded, fit, scales
from attar.quantization.hessian import output_error
from attar.quantization.methods.gptq import gptq
from attar.quantization.methods.refine import refine
from attar.quantization.methods.rtn import rtn

MIXED = EXL2Grid(((6, 32), (4, 64), (3, 96), (2, 64)))
GRIDS = [MIXED, *(EXL2Grid(((bits, 128), (bits, 128))) for bits in (2, 3, 4, 5, 6, 8))]
N, K = 40, 256


@pytest.fixture(scope="module")
def weight():
    return torch.randn(N, K, generator=torch.Generator().manual_seed(0)) * 0.05


@pytest.fixture(scope="module")
def hessian():
    x = torch.randn(1024, K, generator=torch.Generator().manual_seed(1))
    x = x @ torch.randn(K, K, generator=torch.Generator().manual_seed(2)) / 8 + x
    return 2 * x.T @ x / 1024


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_codes_stay_within_their_groups_bits(grid, weight):
    quantized = rtn(weight, grid)
    start = 0
    for bits, width in grid.sections:
        part = quantized.codes[:, start : start + width]
        assert part.min() >= -(2 ** (bits - 1)) and part.max() <= 2 ** (bits - 1) - 1
        assert len(part.unique()) > 2 ** (bits - 1)  # most of them occur
        start += width
    assert quantized.codes.dtype == torch.int8


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_decoded_as_a_reader_of_the_file_does(grid, weight):
    quantized = rtn(weight, grid)
    stored = quantized.parameters.stored
    order = torch.randperm(K, generator=torch.Generator().manual_seed(3))
    tensors = exl2_format.encode(
        quantized.codes, stored["scale_codes"], stored["scale_max"], grid.sections, order
    )
    decoded = exl2_format.decode(tensors, N).float()
    assert torch.equal(decoded[:, order], quantized.dequantize())
    bits = sum(8 * tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert grid.bits_per_weight((N, K)) * N * K == pytest.approx(bits, rel=1e-12)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_decoded_weight_has_the_same_codes(grid, weight):
    quantized = rtn(weight, grid)
    assert torch.equal(grid.quantize(quantized.dequantize(), quantized.parameters).codes, quantized.codes)
    rows = grid.by_row(quantized.parameters, N)
    for column in (0, 33, K - 1):
        codes = grid.encode(weight[:, column], rows.column(column // grid.group_size))
        assert torch.equal(codes, quantized.codes[:, column].float())


def test_codes_are_rounded_to_even_and_kept_between_their_ends():
    values = torch.tensor([-9.0, -2.5, -1.5, 0.5, 1.5, 2.5, 9.0])
    assert bounded(values, torch.tensor(1.0)).tolist() == [-2, -2, -2, 0, 1, 1, 1]
    assert bounded(values, torch.tensor(3.0)).tolist() == [-4, -2, -2, 0, 2, 2, 3]


def test_every_code_is_nearest_to_its_own_level():
    for bits in (2, 3, 4, 5, 6, 8):
        grid = EXL2Grid(((bits, 32),))
        codes = torch.arange(-(2.0 ** (bits - 1)), 2.0 ** (bits - 1))
        assert torch.equal(grid.nearest(grid.level(codes)), codes)
        assert grid.nearest(torch.tensor([-1e9, 1e9])).tolist() == [float(codes[0]), float(codes[-1])]


def test_zeros_bf16_one_row_and_input_untouched(weight):
    before = weight.clone()
    zeros = rtn(torch.zeros(N, K), MIXED)
    assert (zeros.dequantize() == 0).all() and (zeros.parameters.scale > 0).all()
    part = weight.clone()
    part[3] = 0.0
    assert (rtn(part, MIXED).dequantize()[3] == 0).all()
    assert rtn(weight[:1], MIXED).dequantize().shape == (1, K)
    half = rtn(weight.bfloat16(), MIXED)
    assert torch.equal(half.dequantize(), rtn(weight.bfloat16().float(), MIXED).dequantize())
    tiny = rtn(weight * 1e-8, MIXED)  # float16 has no such scales: everything is nearest to zero
    assert (tiny.dequantize() == 0).all() and torch.isfinite(tiny.parameters.scale).all()
    assert torch.equal(weight, before)


def test_saved_and_read_back(weight, tmp_path):
    from safetensors.torch import load_file, save_file

    quantized = rtn(weight, MIXED)
    save_file(quantized.tensors(), tmp_path / "codes.safetensors")
    again = QuantizedTensor.from_tensors(MIXED, load_file(tmp_path / "codes.safetensors"))
    assert torch.equal(again.dequantize(), quantized.dequantize())
    assert torch.equal(again.parameters.top, quantized.parameters.top)
    assert again.parameters.stored.keys() == {"scale_codes", "scale_max"}


def brute(x, v, bits):
    """The least error over a fine ladder of h and every c of each row."""
    top = torch.tensor(2.0 ** (bits - 1) - 1)
    highest = x.abs().max() / (top + 1) / 256
    best = torch.inf
    for h in (highest * torch.logspace(-2.5, 1.2, 200, base=2)).half().float():
        s = scales(h, torch.arange(1.0, 17.0))[:, None, None]
        errors = ((bounded(x / s, top) * s - x).square() @ v).amin(0)
        best = min(best, float(errors.sum()))
    return best


@pytest.mark.few(6)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("kind", ["normal", "rows", "outliers"])
def test_scales_are_nearly_those_of_brute_force(bits, kind):
    g = torch.Generator().manual_seed(bits)
    x = torch.randn(64, 64, generator=g) * 0.03
    if kind == "rows":
        x = x * torch.randn(64, 1, generator=g).exp()
    if kind == "outliers":
        x[::7, 3] *= 12
    v = torch.rand(64, generator=g) + 0.1
    h, c = fit(x, v, bits)
    top, s = torch.tensor(2.0 ** (bits - 1) - 1), scales(h, c)[:, None]
    error = float(((bounded(x / s, top) * s - x).square() @ v).sum())
    # where rows differ, a few of them decide, and where exactly their ladder lies
    slack = {"normal": 1.01, "outliers": 1.03, "rows": 1.03 if bits < 6 else 1.15}[kind]
    assert error < slack * brute(x, v, bits)
    assert c.min() >= 1 and c.max() <= 16 and float(h) == float(h.half())


def test_importance_moves_the_error_to_where_it_does_not_matter(weight):
    importance = torch.ones(K)
    importance[::4] = 50.0
    plain, weighted = rtn(weight, MIXED), MIXED.choose(weight, importance=importance)
    lost = [
        ((result.dequantize() - weight).square() * importance).sum()
        for result in (plain, MIXED.quantize(weight, weighted))
    ]
    assert lost[1] < 0.95 * lost[0]


def test_shrink_clips(weight):
    clipped = MIXED.choose(weight, torch.full((N, K // 32), 0.5))
    assert clipped.scale.mean() < 0.8 * MIXED.choose(weight).scale.mean()
    assert torch.equal(MIXED.choose(weight, 1.0).scale, MIXED.choose(weight, torch.tensor(1.0)).scale)


@pytest.mark.few(3)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_gptq_and_refinement_run_on_it_and_beat_nearest(grid, weight, hessian):
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    W, H = weight[:, order], hessian[order][:, order]
    parameters = grid.choose(W, importance=H.diagonal())
    result = gptq(W, H, grid, parameters=parameters, act_order=False).quantized
    better = refine(result, H, W @ H, weight=W)
    errors = [output_error(W, one.dequantize(), H) for one in (better, result, rtn(W, grid, parameters))]
    assert errors[0] < errors[1] < errors[2]


def test_what_is_no_grid():
    for sections in (((7, 32),), ((4, 48),), ((4, 0),)):
        with pytest.raises(SettingsError, match="sections"):
            EXL2Grid(sections)
    with pytest.raises(SettingsError, match="128 inputs in all"):
        MIXED.choose(torch.zeros(4, 128))
