"""LSQ: eq. 3 of the paper element by element, finite differences of the smooth parts, stored scales."""

import math

import pytest
import torch

from attar.errors import SettingsError
from attar.quantization.grids import IntGrid
from attar.quantization.grids.float8 import Float8Grid
from attar.quantization.grids.fp4 import NVFP4Grid
from attar.quantization.grids.ggml import GGMLGrid
from attar.quantization.grids.nf4 import NF4Grid
from attar.quantization.grids.straight_through import into_cells, levels, limits, spacing, storable
from attar.quantization.methods import lsq


def values(*shape, seed=0, size=1.0):
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def equation_3(v, s, low, high):
    """(v^, dv^/ds, dv^/dv) of one number, as the paper writes it."""
    if v / s <= low:
        return low * s, low, 0.0
    if v / s >= high:
        return high * s, high, 0.0
    return round(v / s) * s, round(v / s) - v / s, 1.0


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_weight_gradients_are_equation_3(bits):
    grid = IntGrid(bits, 8)
    weight = values(4, 16).requires_grad_()
    scale = (grid.choose(weight.detach()).scale * 0.6).requires_grad_()  # some weights are clipped
    upstream = values(4, 16, seed=1)
    rounded = lsq.quantize_weight(weight, scale, grid)
    rounded.backward(upstream)
    g = 1.0 / math.sqrt(8 * grid.high)
    for row in range(4):
        for group in range(2):
            want = 0.0
            for k in range(8 * group, 8 * group + 8):
                at = equation_3(
                    float(weight.detach()[row, k]), float(scale.detach()[row, group]), grid.low, grid.high
                )
                assert float(rounded[row, k]) == pytest.approx(at[0], abs=1e-6)
                assert float(weight.grad[row, k]) == pytest.approx(float(upstream[row, k]) * at[2], abs=1e-6)
                want += float(upstream[row, k]) * at[1] * g
            assert float(scale.grad[row, group]) == pytest.approx(want, rel=1e-4, abs=1e-6)


def test_scale_gradient_of_clipped_and_fixed_codes_is_the_true_one():
    """Where the codes cannot change, v^ is linear in s: finite differences see the same slope, times g."""
    grid = IntGrid(3, 0)
    weight = torch.tensor([[9.0, -9.0, 7.0]])  # all clipped
    upstream = torch.tensor([[1.0, 2.0, -3.0]])
    g = lsq.gradient_factor(3, 3.0)

    def total(s):
        return float((lsq.quantize_weight(weight, torch.tensor([[s]]), grid) * upstream).sum())

    scale = torch.tensor([[1.0]], requires_grad=True)
    (lsq.quantize_weight(weight, scale, grid) * upstream).sum().backward()
    assert float(scale.grad) == pytest.approx(g * (total(1.125) - total(0.875)) / 0.25, rel=1e-5)
    codes = torch.tensor([[3, -4, 2]], dtype=torch.int8)
    scale.grad = None
    (lsq.decode_weight(codes, scale, grid) * upstream).sum().backward()
    assert float(scale.grad) == pytest.approx(g * (3 * 1 - 4 * 2 + 2 * -3), rel=1e-5)


def test_zero_is_learned_from_the_clipped_numbers_alone():
    grid = IntGrid(2, 0, symmetric=False)
    weight = torch.tensor([[5.0, 0.4, -5.0]])
    zero = torch.tensor([[-1.2]], requires_grad=True)
    rounded = lsq.quantize_weight(weight, torch.tensor([[1.0]]), grid, zero)
    assert rounded.tolist() == [[2.0, 0.0, -1.0]]  # codes 1, -1, -2 with zero -1
    rounded.backward(torch.tensor([[1.0, 10.0, 100.0]]))
    assert float(zero.grad) == pytest.approx(-101.0 * lsq.gradient_factor(3, 1.0))


GRIDS = {
    "int4 bf16": IntGrid(4, 16, storage=torch.bfloat16),
    "int3 fp16": IntGrid(3, 16, storage=torch.float16),
    "fp8 block": Float8Grid(group_size=16, rows=4),
    "fp8 tensor": Float8Grid("e5m2", group_size=0, rows=0, storage=torch.bfloat16),
    "nf4": NF4Grid(16),
    "nf4 double": NF4Grid(16, double=True, storage=torch.bfloat16),
    "nvfp4": NVFP4Grid(),
}


@pytest.mark.parametrize("name", GRIDS)
def test_what_is_trained_is_what_is_stored(name):
    """The forward's values are those of a Quantized with the forward's own parameters, and its scales can be
    stored: storing them again changes nothing (scales of scales: nearly nothing)."""
    grid, weight = GRIDS[name], values(8, 64)
    base = grid.choose(weight)
    wanted = base.scale * (1.0 + 0.2 * values(*base.scale.shape, seed=3).abs())
    parameters = lsq.stored(wanted, grid, (8, 64))
    quantized = grid.quantize(weight, parameters)
    rounded = lsq.quantize_weight(weight, wanted, grid)
    assert torch.equal(rounded, quantized.dequantize()) and torch.equal(
        rounded, rounded.to(grid.storage).float()
    )
    assert torch.allclose(parameters.scale, wanted, rtol=0.08)
    assert torch.equal(lsq.decode_weight(quantized.codes, wanted, grid), rounded)
    again = storable(grid, base, parameters.scale, (8, 64)).scale
    assert torch.allclose(again, parameters.scale, rtol=0.07 if parameters.stored else 0.0, atol=0.0)


@pytest.mark.parametrize("name", [*GRIDS, "int4 zero"])
def test_fixed_codes_have_the_gradient_of_the_definition_and_keep_only_codes(name):
    grid = GRIDS.get(name) or IntGrid(4, 16, symmetric=False)
    weight, upstream = values(8, 64), values(8, 64, seed=5)
    base = grid.choose(weight)
    codes = grid.quantize(weight, base).codes
    scale = base.scale.clone().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda part: kept.append(part) or part, lambda part: part):
        decoded = lsq.decode_weight(codes, scale, grid, base.zero)
    decoded.backward(upstream)
    assert [part.dtype for part in kept if part.numel() == codes.numel()] == [codes.dtype]

    exact = base.scale.double().requires_grad_()
    levels = grid.level(grid.tile(codes)).double()
    levels = levels if base.zero is None else levels - base.zero.double()[:, None, :, None]
    (levels * exact[:, None, :, None] * grid.tile(upstream).double()).sum().backward()
    factor = lsq.gradient_factor(codes.numel() // base.scale.numel(), limits(grid)[1])
    assert torch.allclose(scale.grad.double(), factor * exact.grad, rtol=1e-4, atol=1e-5)

    with torch.autocast("cpu", torch.bfloat16):
        product = lsq.decode_weight(codes, scale, grid, base.zero)
    assert product.dtype == torch.bfloat16 and torch.equal(product, decoded.bfloat16())


def test_weights_of_uneven_levels_pass_the_gradient_between_the_ends():
    grid = NF4Grid(4)
    weight = torch.tensor([[0.3, -0.2, 1.5, -1.5]], requires_grad=True)
    scale = torch.ones(1, 1, requires_grad=True)
    rounded = lsq.quantize_weight(weight, scale, grid)
    rounded.backward(torch.tensor([[1.0, 10.0, 100.0, 1000.0]]))
    assert weight.grad.tolist() == [[1.0, 10.0, 0.0, 0.0]]
    table = levels(grid).tolist()
    near = [min(table, key=lambda level: abs(level - v)) for v in (0.3, -0.2)]
    want = (near[0] - 0.3) + 10 * (near[1] + 0.2) + 100 * 1 + 1000 * -1
    assert float(scale.grad) == pytest.approx(want * lsq.gradient_factor(4, 1.0), rel=1e-5)


def test_activations_with_a_learned_scale():
    grid = IntGrid(4, 0)
    x = values(3, 5, 8, size=3.0).requires_grad_()
    scale = torch.tensor([0.5], requires_grad=True)
    upstream = values(3, 5, 8, seed=2)
    result = lsq.quantize_activation(x, scale, grid)
    result.backward(upstream)
    rows = [equation_3(v, 0.5, -8, 7) for v in x.detach().flatten().tolist()]
    assert result.flatten().tolist() == pytest.approx([row[0] for row in rows], abs=1e-6)
    want = sum(u * row[1] for u, row in zip(upstream.flatten().tolist(), rows, strict=True))
    assert float(scale.grad) == pytest.approx(want / math.sqrt(8 * 7), rel=1e-4)
    half = lsq.quantize_activation(x.detach().bfloat16(), scale, grid)
    assert half.dtype == torch.bfloat16


def test_levels_and_gaps_of_known_grids():
    assert levels(IntGrid(3)).tolist() == list(range(-4, 4)) and spacing(IntGrid(3), torch.zeros(2)) is None
    assert len(levels(NF4Grid())) == 16 and len(levels(NVFP4Grid())) == 15
    e4m3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(levels(Float8Grid()), e4m3[e4m3.isfinite()].unique())
    e5m2 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).float()
    assert torch.equal(levels(Float8Grid("e5m2")), e5m2[e5m2.isfinite()].unique())
    assert spacing(NVFP4Grid(), torch.tensor([0.2, -3.5, 5.0, 9.0])).tolist() == [0.5, 1.0, 2.0, 2.0]
    assert limits(Float8Grid()) == (-448.0, 448.0)
    assert limits(GGMLGrid("Q4_0")) == (-8.0, 7.0)


@pytest.mark.parametrize("grid", [IntGrid(4), NF4Grid(), Float8Grid(), NVFP4Grid()])
def test_every_point_of_a_cell_rounds_to_its_code(grid):
    points = values(200, size=limits(grid)[1])
    codes = grid.nearest(points[torch.randperm(200, generator=torch.Generator().manual_seed(5))])
    moved = into_cells(grid, points, codes, 0.1)
    assert torch.equal(grid.level(grid.nearest(moved)), grid.level(codes))
    stays = grid.nearest(points) == codes
    assert torch.equal(moved[stays], points[stays])
    least = into_cells(grid, points, codes, 1e-4)  # no nearer point rounds to the code
    nearer = points + 0.99 * (least - points)
    assert (grid.level(grid.nearest(nearer)) != grid.level(codes))[
        ~stays & (least - points).abs().gt(0.2)
    ].all()


def test_grids_that_search_are_refused():
    with pytest.raises(SettingsError, match="free scales"):
        lsq.quantize_weight(values(2, 256), torch.ones(2, 8), GGMLGrid("Q4_K"))
