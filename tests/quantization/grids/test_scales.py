"""The choice of ranges, against loops over tiles and factors."""

import pytest
import torch

from attar.errors import SettingsError
from attar.quantization.grids import (
    GGML,
    Float8Grid,
    IntGrid,
    MXFP4Grid,
    NF4Grid,
    NVFP4Grid,
    choose_scales,
)
from attar.quantization.grids import scales as module
from attar.quantization.grids.scales import squared_error
from attar.quantization.methods.rtn import rtn

INDEPENDENT = [
    IntGrid(4, 32),
    IntGrid(3, 64, False, torch.bfloat16),
    IntGrid(4, 0, rows=0),
    IntGrid(4, 48, rows=16),
    Float8Grid("e4m3fn", 64),
    NF4Grid(64),
    NVFP4Grid(torch.bfloat16),
    MXFP4Grid(),
]
GRIDS = [*INDEPENDENT, NF4Grid(32, double=True), GGML["Q4_K"], GGML["Q3_K"], GGML["Q4_0"]]


@pytest.fixture(scope="module")
def weight():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(20, 256, generator=generator) * 0.05
    return values * torch.exp(0.7 * torch.randn(20, 256, generator=generator))


@pytest.fixture(scope="module")
def importance():
    return torch.exp(torch.randn(256, generator=torch.Generator().manual_seed(1)))


def lost(weight, grid, parameters, importance=None):
    """Weighted squared error of every weight (N, K), float64."""
    error = (rtn(weight, grid, parameters).dequantize().double() - weight.double()).square()
    return error if importance is None else error * importance.double()


def by_tile(grid, values):
    height, width = grid.rows or values.shape[0], grid.group_size or values.shape[1]
    return torch.tensor(
        [[part.sum().item() for part in row.split(width, 1)] for row in values.split(height, 0)]
    )


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_squared_error_of_each_tile(grid, weight, importance, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 1000)  # several pieces, also inside a tile
    parameters = grid.choose(weight)
    for v in (None, importance):
        expected = by_tile(grid, lost(weight, grid, parameters, v))
        assert torch.allclose(squared_error(weight, grid, parameters, v), expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("grid", INDEPENDENT, ids=str)
def test_mse_takes_the_best_factor_of_each_tile(grid, weight, importance):
    parameters = choose_scales(weight, grid, "mse", importance, low=0.6, high=1.0, steps=5)
    factors = (0.6, 0.7, 0.8, 0.9, 1.0, *((-0.6, -0.7, -0.8, -0.9, -1.0) if grid.signed else ()))
    trials = [grid.choose(weight, factor) for factor in factors]
    errors = torch.stack([by_tile(grid, lost(weight, grid, one, importance)) for one in trials])
    reached = by_tile(grid, lost(weight, grid, parameters, importance))
    assert torch.allclose(reached, errors.amin(0), rtol=1e-4)


@pytest.mark.few(8)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("weighted", [True, False])
def test_mse_is_never_worse_than_absmax(grid, weight, importance, weighted):
    v = importance if weighted else None
    plain, actual = (choose_scales(weight, grid, how, v) for how in ("absmax", "mse"))
    ratio = lost(weight, grid, actual, v).sum() / lost(weight, grid, plain, v).sum()
    assert ratio <= 1.0 + 1e-6
    if not grid.searches or weighted:
        assert ratio < 0.99


@pytest.mark.parametrize(("bits", "gain"), [(2, 0.85), (3, 0.85), (4, 0.92)])
def test_negative_scales_use_the_longer_side_of_symmetric_codes(bits, gain):
    """Against the same search over positive scales alone."""
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
    grid = IntGrid(bits, 32)
    parameters = choose_scales(weight, grid, "mse")
    assert (parameters.scale < 0).any() and (parameters.scale > 0).any()
    mirrored = squared_error(-weight, grid, choose_scales(-weight, grid, "mse"))
    assert torch.allclose(mirrored, squared_error(weight, grid, parameters)), "no side is preferred"
    trials = [grid.choose(weight, factor) for factor in torch.linspace(0.5, 1.1, 31).tolist()]
    positive = torch.stack([squared_error(weight, grid, one) for one in trials]).amin(0)
    assert squared_error(weight, grid, parameters).sum() < gain * positive.sum()
    assert not IntGrid(8, 32).signed and not IntGrid(4, 32, symmetric=False).signed


def test_on_a_long_row_of_few_bits_mse_gains_much():
    weight = torch.randn(8, 2048, generator=torch.Generator().manual_seed(3))
    grid = IntGrid(3, 0)
    plain, actual = (choose_scales(weight, grid, how) for how in ("absmax", "mse"))
    assert lost(weight, grid, actual).sum() < 0.6 * lost(weight, grid, plain).sum()


@pytest.mark.parametrize("grid", [IntGrid(4, 32), IntGrid(4, 48, rows=16), IntGrid(8, 0, rows=0)], ids=str)
@pytest.mark.parametrize("percentile", [1.0, 0.99, 0.9, 0.5])
def test_percentile_is_the_quantile_of_each_tiles_magnitudes(grid, weight, percentile):
    parameters = choose_scales(weight, grid, "percentile", percentile=percentile)
    height, width = grid.rows or 20, grid.group_size or 256
    for i, row in enumerate(weight.split(height, 0)):
        for j, tile in enumerate(row.split(width, 1)):
            top = torch.quantile(tile.abs().double().flatten(), percentile)
            expected = 2 * top / (2**grid.bits - 1)
            assert parameters.scale[i, j].item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.few(12)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("how", module.HOWS)
def test_every_way_on_every_grid(grid, how, weight, importance):
    before = weight.clone()
    parameters = choose_scales(weight, grid, how, importance)
    assert parameters.scale.shape == grid.tiles((20, 256)) and torch.isfinite(parameters.scale).all()
    assert torch.equal(weight, before)
    half = choose_scales(weight.bfloat16(), grid, how, importance)
    assert torch.equal(half.scale, choose_scales(weight.bfloat16().float(), grid, how, importance).scale)
    zeros = choose_scales(torch.zeros(20, 256), grid, how, importance)
    assert (rtn(torch.zeros(20, 256), grid, zeros).dequantize() == 0).all()


def test_absmax_is_the_grids_own_rule(weight):
    for grid in GRIDS:
        assert torch.equal(choose_scales(weight, grid).scale, grid.choose(weight).scale)


@pytest.mark.parametrize("settings, field", [
    ({"how": "best"}, "how"), ({"how": "percentile", "percentile": 0.0}, "percentile"),
    ({"how": "mse", "low": 0.0}, "low"), ({"how": "mse", "steps": 0}, "low"),
])  # fmt: skip
def test_settings_are_checked(weight, settings, field):
    with pytest.raises(SettingsError, match=field):
        choose_scales(weight, IntGrid(4, 32), **settings)
