"""The compiled loop over columns against the one in torch, which the tests of GPTQ and of refinement hold
against definitions."""

import pytest
import torch

from attar.kernels import columns
from attar.kernels.build import load
from attar.quantization.grids import GGML, IntGrid
from attar.quantization.grids.float8 import Float8Grid, MXFP8Grid
from attar.quantization.grids.fp4 import MXFP4Grid, NVFP4Grid
from attar.quantization.grids.real import RealGrid
from attar.quantization.hessian import Hessian, factorize
from attar.quantization.methods.gptq import gptq
from attar.quantization.methods.qronos import qronos
from attar.quantization.methods.refine import refine
from attar.quantization.transforms.awq import search_clip
from attar.sparsity import parse_sparsity

pytestmark = pytest.mark.skipif(load("columns") is None, reason="no C++ compiler")

GRIDS = [
    IntGrid(2, 32),
    IntGrid(3, 0),
    IntGrid(4, 64, symmetric=False, storage=torch.bfloat16),
    IntGrid(8, 128, rows=0),
    NVFP4Grid(),
    MXFP4Grid(),
    Float8Grid(),
    Float8Grid("e5m2", 128, rows=0),
    MXFP8Grid(),
    *(GGML[kind] for kind in ("Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q4_K", "Q6_K", "IQ4_NL", "IQ4_XS")),
]
LEAST = 0.998  # of the codes; sums in another order tip one that lies half way


def layer(rows, columns=512, seed=0):
    """A weight and an H with correlated inputs, one of them dead."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.eye(columns) + torch.randn(columns, columns, generator=g) / columns**0.5
    X = (torch.randn(3 * columns, columns, generator=g) * torch.linspace(0.2, 2.0, columns)) @ mix
    X[:, 7] = 0.0
    seen = Hessian(columns)
    seen.add(X)
    return torch.randn(rows, columns, generator=g) * 0.1, seen.value()


def objective(W, codes_and_scale, H):
    E = codes_and_scale.dequantize().double() - W
    return float(((E @ H.double()) * E).sum())


def both(monkeypatch, run):
    """What a function gives compiled, and in torch."""
    monkeypatch.delenv("ATTAR_KERNELS", raising=False)
    compiled = run()
    monkeypatch.setenv("ATTAR_KERNELS", "off")
    return compiled, run()


@pytest.mark.few(3)
@pytest.mark.parametrize("rows", [1, 67])  # 67: no multiple of any vector's width
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_gptq_and_refinement_are_those_of_torch(grid, rows, masked, monkeypatch):
    W, H = layer(rows)
    mask = torch.rand(W.shape, generator=torch.Generator().manual_seed(1)) > 0.5 if masked else None
    W = W if mask is None else W * mask
    parameters = grid.choose(W, importance=H.diagonal())  # the searches are compared elsewhere

    def run():
        start = gptq(W, H, grid, parameters=parameters, mask=mask).quantized
        return start, refine(start, H, weight=W, mask=mask)

    for compiled, plain in zip(*both(monkeypatch, run), strict=True):
        alike = (compiled.codes == plain.codes).double().mean(1) >= LEAST
        assert alike.double().mean() >= 0.98, "a code that tips takes others of its row along, of no other"
        assert objective(W, compiled, H) <= 1.001 * objective(W, plain, H)
        same = torch.isclose(compiled.parameters.scale, plain.parameters.scale, rtol=1e-2, atol=0)
        assert same.double().mean() >= 0.98


@pytest.mark.parametrize("grid", [NVFP4Grid(), Float8Grid(), Float8Grid("e5m2")], ids=str)
def test_floats_are_rounded_as_torch_rounds_them(grid):
    """Every value, every half way between two and its neighbours, subnormal and beyond the largest."""
    if isinstance(grid, Float8Grid):
        values = torch.arange(256, dtype=torch.uint8).view(grid.code_dtype).float()
    else:
        values = grid.level(torch.arange(16))
    values = values[values.isfinite()].unique()
    values = torch.cat([values, (values[1:] + values[:-1]) / 2, values * 2.0**-9, values[-1:] * 1000])
    infinity = torch.tensor(torch.inf)
    values = torch.cat([values, values.nextafter(infinity), values.nextafter(-infinity)])
    values = values[values != 0]  # whose sign is of no use: -0.0 becomes 0.0 here
    N = len(values)
    tiles = columns.TileScales(
        grid.code_book(), torch.ones(1, N), None, None, torch.zeros(1, dtype=torch.int64)
    )
    codes, errors = torch.empty(1, N), torch.empty(1, N)
    columns.round_block(tiles, slice(0, 1), values[None], torch.eye(1), codes, errors)
    assert torch.equal(codes[0], grid.nearest(values))
    assert torch.equal(errors[0], values - grid.level(codes[0]))


def test_the_first_column_of_qronos_is_decided_by_its_own_values(monkeypatch):
    W, H = layer(40, 96)
    cross = H + 0.1 * torch.randn(H.shape, generator=torch.Generator().manual_seed(2)) * H.diagonal().mean()
    grid = IntGrid(4, 32)
    compiled, plain = both(monkeypatch, lambda: qronos(W, H, cross, grid).quantized)
    assert (compiled.codes == plain.codes).double().mean() >= LEAST


@pytest.mark.few(4)
@pytest.mark.parametrize("rows", [1, 67])
@pytest.mark.parametrize("amount", ["0.5", "2:4", "4:8", "1:3", "24:64"])
@pytest.mark.parametrize("grid", [RealGrid(), IntGrid(4, 64), IntGrid(8, 32, False), GGML["Q4_0"]], ids=str)
def test_masks_chosen_in_the_loop_are_those_of_torch(grid, amount, rows, monkeypatch):
    W, H = layer(rows, 576)
    sparsity = parse_sparsity(amount)
    compiled, plain = both(monkeypatch, lambda: gptq(W, H, grid, sparsity=sparsity))
    # a code that tips changes its row's later scores, and with a fraction the threshold of all rows
    least = LEAST if isinstance(grid, RealGrid) else 0.95
    assert (compiled.mask == plain.mask).double().mean() >= least
    assert objective(W, compiled.quantized, H) == pytest.approx(objective(W, plain.quantized, H), rel=0.03)
    for result in (compiled, plain):
        weight = result.quantized.dequantize()
        assert (
            not weight[~result.mask].any() and weight[result.mask].count_nonzero() > 0.6 * result.mask.sum()
        )


@pytest.mark.few(1)
@pytest.mark.parametrize("amount", ["0.5", "2:4", "4:8"])
def test_a_mask_is_narrowed_to_the_sparsity(amount, monkeypatch):
    W, H = layer(67, 576)
    sparsity = parse_sparsity(amount)
    mask = torch.rand(W.shape, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[:, :8] = False
    compiled, plain = both(monkeypatch, lambda: gptq(W, H, RealGrid(), mask=mask, sparsity=sparsity))
    assert (compiled.mask == plain.mask).double().mean() >= LEAST
    assert not (compiled.mask & ~mask).any() and not (plain.mask & ~mask).any()
    if sparsity.of:
        wanted = mask.unflatten(1, (-1, sparsity.of)).sum(-1).clamp(max=sparsity.kept)
        assert torch.equal(compiled.mask.unflatten(1, (-1, sparsity.of)).sum(-1), wanted)
    else:
        assert compiled.mask.sum() == W.numel() - (W.numel() + 1) // 2


@pytest.mark.parametrize("amount", ["2:4", "4:8"])
def test_of_equal_scores_the_first_stay(amount, monkeypatch):
    W, sparsity = torch.ones(40, 64), parse_sparsity(amount)
    W[:20] = torch.randint(0, 2, (20, 64), generator=torch.Generator().manual_seed(0))
    compiled, plain = both(monkeypatch, lambda: gptq(W, torch.eye(64), RealGrid(), sparsity=sparsity))
    assert torch.equal(compiled.mask, plain.mask)
    assert torch.equal(compiled.mask, sparsity.mask(W))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_nothing(threads, monkeypatch):
    monkeypatch.setattr(columns, "WEIGHTS_PER_THREAD", 1000)
    W, H = layer(300, 256)
    block = factorize(H[:128, :128], together=4)  # one block: torch's products depend on threads
    before = torch.get_num_threads()

    def run():
        sparse = gptq(W[:, :128], H, RealGrid(), sparsity=parse_sparsity("2:4"), factor=block)
        return gptq(W[:, :128], H, IntGrid(4, 64), factor=block).quantized.codes, sparse.quantized.codes

    first = run()
    try:
        torch.set_num_threads(threads)
        again = run()
    finally:
        torch.set_num_threads(before)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


@pytest.mark.parametrize(
    "grid",
    [
        IntGrid(3, 64),
        IntGrid(4, 100),
        IntGrid(4, 0),
        IntGrid(2, 32, symmetric=False),
        NVFP4Grid(),
        MXFP4Grid(),
        Float8Grid(group_size=64),
    ],
    ids=str,
)
def test_tiles_are_clipped_as_in_torch(grid, monkeypatch):
    W, H = layer(67, 256)
    compiled, plain = both(monkeypatch, lambda: search_clip(W, H, grid))
    assert (compiled.shrink == plain.shrink).double().mean() > 0.99
    assert compiled.error == pytest.approx(plain.error, rel=1e-3)
    assert compiled.error < compiled.rtn_error


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("kind", ["IQ4_NL", "Q4_0"])
def test_exact_ties_go_where_torch_takes_them(kind, sign, monkeypatch):
    """Half way between two uneven levels the upper one, between two integers the even one."""
    grid = GGML[kind]
    levels = grid.level(torch.arange(16))
    middles = torch.nn.functional.pad((levels[:-1] + levels[1:]) / 2, (0, 17))[None]  # (1, 32)
    W = sign * middles.repeat(3, 1)
    parameters = grid.parameters({"d": torch.ones(3, 1).half()})
    run = lambda: gptq(W, torch.eye(32), grid, parameters=parameters).quantized.codes  # noqa: E731
    compiled, plain = both(monkeypatch, run)
    assert torch.equal(compiled, plain) and torch.equal(plain, grid.quantize(W, parameters).codes)
    if kind == "IQ4_NL" and sign > 0:
        assert plain[0, :15].tolist() == list(range(1, 16))
