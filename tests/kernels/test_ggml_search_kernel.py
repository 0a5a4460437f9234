"""The compiled search against the one in torch, against exhaustive search, and on weights that are hard."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from attar.checkpoint import open_checkpoint
from attar.errors import NumericsError
from attar.kernels import ggml_search as kernel
from attar.kernels.build import load
from attar.kernels.threads import one_thread
from attar.quantization.grids import GGML
from attar.quantization.grids.ggml_search import clipped

pytestmark = pytest.mark.skipif(load("ggml_search") is None, reason="no C++ compiler")

KINDS = list(GGML)


def importance(columns):
    return torch.exp(torch.randn(columns, generator=torch.Generator().manual_seed(1)))


@pytest.fixture(scope="module")
def weights():
    """Normal, heavy-tailed and real ones."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(32, 512, generator=generator) * 0.02
    heavy = normal * torch.exp(torch.randn(32, 512, generator=generator))
    real = open_checkpoint("attar:tiny").load("model.layers.1.mlp.down_proj.weight")[:32].float()
    return {"normal": normal, "heavy": heavy, "real": real}


def error(searched, weight, v=None):
    lost = (searched.dequantize().double() - weight).square()
    return float((lost if v is None else lost * v).sum())


def plain_search(kind, weight, *, shrink=None, codes=True, effort=kernel.EFFORT):
    v = torch.ones(weight.shape[1])
    return kernel.search(kind, GGML[kind].layout, weight, v, shrink=shrink, codes=codes, effort=effort)


def same(a, b):
    assert a.stored.keys() == b.stored.keys()
    return all(torch.equal(a.stored[name], b.stored[name]) for name in a.stored) and (
        torch.equal(a.codes, b.codes) if a.codes is not None and b.codes is not None else a.codes is b.codes
    )


@pytest.mark.few(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [False, True])
def test_its_error_is_not_above_the_fallbacks(kind, weighted, weights, monkeypatch):
    for weight in weights.values():
        v = importance(weight.shape[1]) if weighted else None
        monkeypatch.delenv("ATTAR_KERNELS", raising=False)
        compiled = GGML[kind].search(weight, v)
        monkeypatch.setenv("ATTAR_KERNELS", "off")
        fallback = GGML[kind].search(weight, v)
        assert error(compiled, weight, v) <= 1.001 * error(fallback, weight, v)
        stored, expected = compiled.parameters.stored, fallback.parameters.stored
        assert list(stored) == list(expected)
        assert all(stored[name].dtype == value.dtype for name, value in expected.items())
        assert all(stored[name].shape == value.shape for name, value in expected.items())


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_those_of_the_grid(kind, weights):
    for weight in weights.values():
        result = GGML[kind].search(weight, importance(weight.shape[1]))
        expected = GGML[kind].quantize(weight, result.parameters)
        assert result.codes.dtype == expected.codes.dtype
        assert torch.equal(result.codes, expected.codes)
        assert torch.equal(result.dequantize(), expected.dequantize())


@pytest.mark.parametrize("kind", ["Q2_K", "Q4_K"])
def test_scale_codes_against_an_exhaustive_search(kind, weights):
    """Under the d and d_m that were found, the best c and c_m of each tile by trying them all, in float64."""
    layout, weight = GGML[kind].layout, weights["normal"][:2, :256]
    actual = plain_search(kind, weight).stored
    most, tile = layout.codes[1], layout.tile
    c, m = torch.meshgrid(torch.arange(1.0, most + 1), torch.arange(0.0, most + 1), indexing="ij")
    ours = best = 0.0
    for row in range(2):
        d, dmin = actual["d"][row, 0].double(), actual["dmin"][row, 0].double()
        for j, x in enumerate(weight[row].double().reshape(-1, tile)):
            s, base = (d * c)[..., None], (dmin * m)[..., None]
            lost = ((((x + base) / s).round().clamp(0, layout.high) * s - base - x) ** 2).sum(-1)
            ours += float(lost[int(actual["scale_codes"][row, j]) - 1, int(actual["minimum_codes"][row, j])])
            best += float(lost.min())
    assert best <= ours < (1.03 if kind == "Q2_K" else 1.01) * best


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q8_0", "IQ4_NL"])
def test_scales_against_an_exhaustive_search(kind, weights):
    """Blocks of 32 under every float16 d worth trying."""
    grid, rows = GGML[kind], weights["heavy"][0].reshape(-1, 32)
    ours = best = 0.0
    for x in rows:
        result = grid.search(x[None])
        ours += error(result, x[None].double())
        peak, (down, up) = float(x.abs().max()), grid.layout.ends
        sizes = torch.arange(
            int(torch.tensor(0.6 * peak / max(-down, up)).half().view(torch.int16)),
            int(torch.tensor(2.0 * peak / min(-down, up)).half().view(torch.int16)),
        )
        d = sizes.to(torch.int16).view(torch.float16).float()
        d = torch.cat([d, -d])[:, None]
        lost = (grid.level(grid.nearest(x / d)) * d - x).double().square().sum(1)
        best += float(lost.min())
    assert best * 0.9999 <= ours < (1.06 if kind == "Q8_0" else 1.01) * best


@pytest.mark.few(16)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 15, 17, 33])
def test_neither_threads_nor_neighbours_change_a_row(kind, rows, monkeypatch):
    weight = torch.randn(rows, 768, generator=torch.Generator().manual_seed(3))
    results = []
    monkeypatch.setattr(
        torch, "set_num_threads", lambda count: None
    )  # what it finds below it would set again
    for threads in (1, 2, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append(plain_search(kind, weight))
    assert same(results[0], results[1]) and same(results[0], results[2])
    last = plain_search(kind, weight[-1:])
    assert torch.equal(last.codes, results[0].codes[-1:])
    assert all(torch.equal(value, results[0].stored[name][-1:]) for name, value in last.stored.items())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q3_K", "Q5_K"])
def test_other_types_are_converted_a_few_rows_at_a_time(kind, weights, monkeypatch):
    monkeypatch.setattr(kernel, "CHUNK", 1)
    weight = weights["heavy"][:23]
    for other in (weight.bfloat16(), weight.half(), weight.double(), weight.T.contiguous().T):
        kept = other.clone()
        assert same(plain_search(kind, other), plain_search(kind, other.float().contiguous()))
        assert torch.equal(other, kept)


@pytest.mark.few(28)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-30, 1e-6, 1e4, 6e4, 1e37])
def test_hard_sizes(kind, size):
    weight = torch.randn(3, 256, generator=torch.Generator().manual_seed(4)).clamp(-3, 3) * size
    weight[1, 1:] = 0.0
    weight[2] = size
    result = GGML[kind].search(weight)
    assert (result.parameters.scale != 0).all() and torch.isfinite(result.parameters.scale).all()
    assert torch.isfinite(result.parameters.stored["d"]).all()
    decoded = result.dequantize()
    assert torch.isfinite(decoded).all()
    if size in (1e4, 6e4):
        assert error(result, weight) < 0.1 * float(weight.double().square().sum())
    elif size < 1e-6:
        assert decoded.abs().max() <= 5e-6


@pytest.mark.parametrize("kind", ["Q2_K", "Q4_K"])
def test_scales_below_the_smallest_float16_still_have_a_use(kind):
    """d cannot be small enough for these weights with the largest code, but smaller codes do."""
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(5)) * 2e-6
    coarse = torch.randn(16, 256, generator=torch.Generator().manual_seed(5)) * 2e-2
    lost = error(GGML[kind].search(weight), weight) / float(weight.double().square().sum())
    usual = error(GGML[kind].search(coarse), coarse) / float(coarse.double().square().sum())
    assert lost < 1.5 * usual


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [(0, 0), (18, 511), (7, 300)])
def test_weights_that_are_not_finite_are_refused(wrong, where):
    weight = torch.zeros(19, 512)
    weight[where] = wrong
    for kind in ("Q4_0", "Q6_K"):
        with pytest.raises(NumericsError, match="a weight is not finite"):
            plain_search(kind, weight)
    v = torch.ones(512)
    v[where[1]] = wrong
    with pytest.raises(NumericsError, match="an importance is not finite"):
        kernel.search("Q4_K", GGML["Q4_K"].layout, torch.zeros(2, 512), v)


@pytest.mark.parametrize("kind", KINDS)
def test_shrink_clips_each_tile_first(kind, weights):
    layout, weight = GGML[kind].layout, weights["normal"]
    shrink = torch.rand(32, 512 // layout.tile, generator=torch.Generator().manual_seed(6)) * 0.7 + 0.3
    x = clipped(weight.reshape(32, -1, layout.block // layout.tile, layout.tile), shrink).reshape(32, 512)
    assert not torch.equal(x, weight)
    assert same(plain_search(kind, weight, shrink=shrink), plain_search(kind, x))


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_effort_lowers_the_error(kind, weights):
    weight = weights["heavy"]
    errors = []
    for effort in (0, 1, 3):
        actual = plain_search(kind, weight, effort=effort)
        quantized = GGML[kind].quantize(weight, GGML[kind].parameters(actual.stored))
        errors.append(error(quantized, weight))
    assert errors[2] <= errors[1] < errors[0]


@pytest.mark.parametrize("kind", KINDS)
def test_importance_moves_the_error_to_inputs_that_matter_less(kind, weights):
    weight, v = weights["normal"], importance(512)
    plain, weighted = GGML[kind].search(weight), GGML[kind].search(weight, v)
    assert error(weighted, weight, v) < error(plain, weight, v)
    assert error(weighted, weight) > error(plain, weight)


def test_no_kernel_leaves_it_to_the_fallback(monkeypatch):
    weight = torch.randn(4, 256)
    assert plain_search("Q4_K", weight.to("meta")) is None
    assert plain_search("Q4_K", weight, codes=False).codes is None
    monkeypatch.setenv("ATTAR_KERNELS", "off")
    assert plain_search("Q4_K", weight) is None
    assert GGML["Q4_K"].search(weight).codes.shape == (4, 256)


def test_no_rows():
    actual = plain_search("Q4_K", torch.zeros(0, 512))
    assert actual.codes.shape == (0, 512) and actual.stored["d"].shape == (0, 2)


def test_torch_has_its_threads_again_behind_the_search():
    """Inside, threads that begin have none of torch's either; also behind an error."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread(), ThreadPoolExecutor(1) as pool:
            assert torch.get_num_threads() == pool.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 2
        with pytest.raises(ValueError), one_thread():
            raise ValueError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
