"""NVFP4 and MXFP4 by brute force over the sixteen values."""

import itertools
import math

import pytest
import torch

from attar.quantization.grids import MXFP4Grid, NVFP4Grid
from attar.quantization.methods.rtn import rtn

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BOTH = [NVFP4Grid(), MXFP4Grid()]


@pytest.fixture(scope="module")
def weight():
    return torch.randn(24, 192, generator=torch.Generator().manual_seed(0)) * 0.04


def brute(value):
    """The nearest of the eight magnitudes; of two equally near the even place. Bit 3: the sign."""
    distance = [abs(abs(value) - level) for level in VALUES.tolist()]
    least = min(distance)
    ties = [index for index, one in enumerate(distance) if one == least]
    index = ties[0] if len(ties) == 1 else next(index for index in ties if index % 2 == 0)
    return index + 8 * (math.copysign(1, value) < 0)


@pytest.mark.parametrize("grid", BOTH, ids=str)
def test_nearest_by_brute_force(grid):
    halves = (VALUES[1:] + VALUES[:-1]) / 2
    around = [halves, halves.nextafter(torch.tensor(9.0)), halves.nextafter(torch.tensor(-9.0)), VALUES]
    values = torch.cat([*around, torch.rand(500, generator=torch.Generator().manual_seed(1)) * 9])
    values = torch.cat([values, -values])
    assert grid.nearest(values).tolist() == [brute(value) for value in values.tolist()]


@pytest.mark.parametrize("grid", BOTH, ids=str)
def test_levels_and_their_codes(grid):
    levels = grid.level(torch.arange(16, dtype=torch.uint8))
    assert levels[:8].tolist() == VALUES.tolist() and levels[8:].tolist() == (-VALUES).tolist()
    assert grid.nearest(levels).tolist() == list(range(16))  # -0 is code 8


def test_nvfp4_scales(weight):
    quantized = rtn(weight, NVFP4Grid(), NVFP4Grid().choose(weight, 1.0))
    stored = quantized.parameters.stored
    assert stored["local_scale"].dtype == torch.float8_e4m3fn
    whole = 448 * 6 / weight.abs().max()
    assert stored["global_scale"].shape == (1,) and stored["global_scale"].item() == whole.item()
    top = weight.reshape(24, 12, 16).abs().amax(-1)
    local = (whole * (top / 6)).to(torch.float8_e4m3fn)
    assert torch.equal(stored["local_scale"].float(), local.float())
    assert local.float().max() == 448
    assert torch.equal(quantized.parameters.scale, local.float() / whole)


@pytest.mark.parametrize("weighted", [False, True])
def test_each_group_of_nvfp4_has_its_largest_value_at_six_or_at_four(weight, weighted):
    """By a loop over the groups."""
    grid, v = NVFP4Grid(), torch.exp(torch.randn(192, generator=torch.Generator().manual_seed(2)))
    chosen = grid.choose(weight, importance=v if weighted else None).scale
    six, four = (grid.choose(weight, shrink).scale for shrink in (1.0, 1.5))
    ends = {6: 0, 4: 0}
    for row, group in itertools.product(range(24), range(12)):
        at = slice(16 * group, 16 * group + 16)
        w, errors = weight[row, at].double(), []
        for scale in (six[row, group].double(), four[row, group].double()):
            distance = ((w.abs() / scale)[:, None] - VALUES.double()).abs().amin(1) * scale
            errors.append(float((distance.square() * (v[at] if weighted else 1.0)).sum()))
        end = 6 if errors[0] <= errors[1] else 4
        ends[end] += 1
        assert chosen[row, group] == (six if end == 6 else four)[row, group]
    assert min(ends.values()) > 80


@pytest.mark.parametrize("factor", [2.0**-20, 2.0**20])
def test_nvfp4_does_not_depend_on_the_size_of_the_weights(weight, factor):
    plain, scaled = NVFP4Grid().choose(weight), NVFP4Grid().choose(weight * factor)
    assert torch.equal(scaled.scale, plain.scale * factor)


def test_nvfp4_of_several_weights_can_have_one_global_scale(weight):
    peak = weight.abs().max().item()
    alone, shared = (grid.choose(weight, 1.0) for grid in (NVFP4Grid(), NVFP4Grid(peak=2 * peak)))
    assert shared.stored["global_scale"].item() == pytest.approx(alone.stored["global_scale"].item() / 2)
    assert (shared.stored["local_scale"].float() <= alone.stored["local_scale"].float()).all()
    assert torch.allclose(shared.scale, alone.scale, rtol=0.15)


@pytest.mark.parametrize("top, exponent", [
    (1.0, -2), (1.74, -2), (1.75, -1), (2.0, -1), (3.49, -1), (3.5, 0), (6.0, 0), (6.99, 0), (7.0, 1),
])  # fmt: skip
def test_mxfp4_exponent(top, exponent):
    weight = torch.full((1, 32), 0.01)
    weight[0, 5] = -top
    result = MXFP4Grid().choose(weight)
    assert result.stored["exponent"].item() - 127 == exponent
    assert result.scale.item() == 2.0**exponent


def test_mxfp4_scales_are_powers_of_two_that_use_the_range(weight):
    quantized = rtn(weight, MXFP4Grid())
    top = weight.reshape(24, 6, 32).abs().amax(-1) / quantized.parameters.scale
    assert (top >= 3.5).all() and (top < 7.0).all()
    assert torch.equal(quantized.parameters.scale.log2(), quantized.parameters.scale.log2().round())


def test_tiny_and_large_groups_keep_finite_scales():
    weight = torch.zeros(3, 64)
    weight[0] = 1e-38
    weight[1, :32] = 3e38
    for grid in BOTH:
        quantized = rtn(weight, grid)
        assert torch.isfinite(quantized.parameters.scale).all() and (quantized.parameters.scale > 0).all()
        assert (quantized.dequantize()[2] == 0).all()


def test_bits_per_weight():
    assert NVFP4Grid().bits_per_weight((64, 256)) == 4.5 + 32 / (64 * 256)
    assert MXFP4Grid().bits_per_weight((64, 256)) == 4.25
