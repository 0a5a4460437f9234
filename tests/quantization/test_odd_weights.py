"""Every rounding, every way to set zeros and every grid on weights and inputs that are all zero, constant,
tiny, huge, one row, or unseen by the calibration: nothing fails, and what has no information is kept."""

import pytest
import torch

from attar.pruning.layerwise import LayerPruner
from attar.pruning.linears import PrunedLinear
from attar.pruning.reconstruction.linear import LinearReconstructor
from attar.pruning.zeros import ZEROS
from attar.quantization.gates import check_layers
from attar.quantization.grids import GGML, Float8Grid, IntGrid, MXFP4Grid, NF4Grid, NVFP4Grid
from attar.quantization.hessian import CrossHessian, Hessian, all_finite, informed
from attar.quantization.layerwise import LayerSolver
from attar.quantization.methods.exl2 import PATTERNS, quantize_layer
from attar.quantization.methods.rtn import rtn
from attar.quantization.rounding import METHODS
from attar.quantization.settings import quantize_settings
from attar.quantization.transforms.awq import InputStatistics
from attar.quantization.transforms.smoothquant import ActivationMaxima, migration
from attar.sparsity import parse_sparsity

N, K, GROUP = 32, 64, 32
UNSEEN = [3, 17, 40]
SWEPT = ["awq", "gptq", "gptaq", "qronos", "yaqa"]
GRID = IntGrid(4, GROUP)


def odd(case):
    """A weight (N, K) and inputs (T, K)."""
    g = torch.Generator().manual_seed(0)
    W, X = torch.randn(N, K, generator=g), torch.randn(300, K, generator=g) * torch.logspace(-1, 1, K)
    if case == "unseen columns":
        X[:, UNSEEN] = 0.0
    if case == "no inputs":
        X.zero_()
    if case == "zero":
        W.zero_()
    if case == "zero row and column":
        W[5], W[:, 9] = 0.0, 0.0
    if case == "constant":
        W.fill_(0.25)
    if case in ("one token", "no token"):
        X = X[: case == "one token"]
    return {"one row": W[:1], "huge": W * 1e12, "tiny": W * 1e-30}.get(case, W), X


CASES = [
    "unseen columns", "no inputs", "zero", "zero row and column", "constant", "one token", "no token",
    "one row", "huge", "tiny",
]  # fmt: skip


BLIND = ("no inputs", "no token")


def seen(accumulator, X):
    accumulator.add(X, X) if isinstance(accumulator, CrossHessian) else accumulator.add(X)
    return accumulator


def rounded(method, W, X, **options):
    settings = quantize_settings(method=method, **options).rounding
    curvature = (lambda _: torch.eye(len(W))) if method == "yaqa" else None
    solver = LayerSolver({"layer": GRID}, METHODS[method], settings, output_hessian=curvature)
    return solver.solve({"layer": W}, seen(solver.accumulator(["layer"], K), X))["layer"]


@pytest.mark.few(20)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", SWEPT)
def test_every_rounding_keeps_what_it_has_no_information_of(method, case):
    W, X = odd(case)
    result = rounded(method, W, X)
    whole, lost = float(W.double().norm()), float((result.weight - W).double().norm())
    assert result.weight.isfinite().all() and lost <= 0.25 * whole
    unseen = {"unseen columns": UNSEEN, **{blind: list(range(K)) for blind in BLIND}}.get(case, [])
    assert result.report["unseen"] == len(unseen)
    if unseen and method != "awq":
        step = result.tensors["scale"].abs().repeat_interleave(GROUP, 1)
        assert ((result.weight - W).abs() <= 0.51 * step)[:, unseen].float().mean() > 0.95  # scales clip
    named = {"name": "layer", **result.report}
    findings = [one for one in check_layers([named], few_tokens=0) if one.severity == "error"]
    assert not findings
    assert any(one.check == "inputs" for one in check_layers([named])) == bool(unseen)


@pytest.mark.parametrize("case", ["unseen columns", *BLIND])
@pytest.mark.parametrize("method", SWEPT)
def test_without_a_search_unseen_columns_have_the_codes_of_rounding_to_nearest(method, case):
    W, X = odd(case)
    options = {} if method == "awq" else {"refine": 0}
    result = rounded(method, W, X, scales="absmax", **options)
    nearest = rtn(W, GRID).codes
    columns = UNSEEN if case == "unseen columns" else range(K)
    for column in columns:
        assert torch.equal(result.tensors["codes"][:, column], nearest[:, column])


@pytest.mark.few(20)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("amount", ["0.5", "2:4"])
@pytest.mark.parametrize("method", [name for name, one in ZEROS.items() if one.sees_text])
def test_every_way_to_set_zeros_judges_unseen_inputs_by_their_weights(method, amount, case):
    W, X = odd(case)
    linear = PrunedLinear("layer", "layer.weight", 0, tuple(W.shape), False, torch.float32)
    one = ZEROS[method]
    options = {name: {"damp": 0.01, "iterations": 30}[name] for name in one.arguments}
    sparsity = parse_sparsity(amount)
    pruner = LayerPruner({"layer": linear}, {"layer": sparsity}, one.solver, options, one.factored)
    solution = pruner.solve({"layer": W}, seen(pruner.accumulator(["layer"], K), X))["layer"]
    assert solution.weight.isfinite().all() and solution.report["error"] >= 0
    zeros = (solution.weight == 0).float().mean()
    assert zeros >= 0.49 and (zeros <= 0.52 or (W == 0).any())
    if case == "unseen columns":
        stay = (solution.weight[:, UNSEEN] != 0).float().mean()
        assert 0.25 < stay < 0.75 and solution.report["unseen"] == len(UNSEEN)


@pytest.mark.few(30)
@pytest.mark.parametrize("originals", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cut", ["columns", "scattered", "none"])
def test_reconstruction_leaves_what_has_no_information(cut, case, bias, originals):
    W, X = odd(case)
    mask = torch.ones_like(W, dtype=torch.bool)
    if cut == "columns":
        mask[:, :8] = False
    if cut == "scattered":
        mask = torch.rand(W.shape, generator=torch.Generator().manual_seed(1)) > 0.5
    biases = {"layer": torch.zeros(len(W))} if bias else {}
    solver = LinearReconstructor(lambda _: W * mask, biases, originals)
    accumulator = solver.accumulator(["layer"], K)
    new = solver.solve({"layer": W}, seen(accumulator, X))["layer"].weight
    assert new.isfinite().all() and not new[~mask].any()
    if case in ("unseen columns", *BLIND):
        at = UNSEEN if case == "unseen columns" else slice(None)
        torch.testing.assert_close(new[:, at], (W * mask)[:, at], rtol=1e-3, atol=1e-4)


def test_exl2_rounds_unseen_inputs_to_nearest():
    W, X = odd("unseen columns")
    H = seen(Hessian(K), X).value()
    got = quantize_layer(W, H, PATTERNS[10]).weight
    error = (got - W)[:, UNSEEN].norm() / W[:, UNSEEN].norm()
    assert error < 0.3


def test_smoothing_scales_of_unseen_channels_are_those_of_usual_ones():
    W, X = odd("unseen columns")
    magnitude = seen(InputStatistics(K), X).magnitude()
    assert (magnitude[UNSEEN] == magnitude[magnitude > 0].median()).all() and magnitude.min() > 0.01
    scale = migration(seen(ActivationMaxima(K, 0), X).largest, [W], 0.5)
    assert scale[UNSEEN].min() > scale.min() and scale.isfinite().all()


@pytest.mark.parametrize("values", [[0.0, 4.0, 1.0, 2.0], [0.0, 0.0], [5.0, 3.0]])
def test_zeros_become_the_lower_median_of_the_others_and_alone_they_become_one(values):
    wanted = {0.0: 2.0 if len(values) == 4 else 1.0}
    assert informed(torch.tensor(values)).tolist() == [wanted.get(one, one) for one in values]
    assert informed(torch.tensor([0.0, float("nan")]))[1].isnan()


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_nothing_is_finite(shape):
    assert all_finite(torch.zeros(shape))


GRIDS = {
    **GGML,
    "int4": IntGrid(4, 32, storage=torch.float16),
    "int4 asymmetric": IntGrid(4, 32, False, storage=torch.bfloat16),
    "nvfp4": NVFP4Grid(),
    "mxfp4": MXFP4Grid(),
    "nf4": NF4Grid(64),
    "fp8": Float8Grid("e4m3fn", 0, 1),
}


@pytest.mark.few(12)
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", GRIDS)
def test_small_weights_keep_what_the_scales_can_hold(name, compiled, monkeypatch):
    """A float16 scale is at least 6e-8: codes get larger where it stops getting smaller."""
    if not compiled:
        monkeypatch.setenv("ATTAR_KERNELS", "off")
    if name.startswith("IQ4"):
        pytest.skip("no level is zero")
    W = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    grid = GRIDS[name]
    for size, bound in ((1e-6, 0.3), (1e-7, 0.35)):
        rounded = rtn(W * size, grid).dequantize()
        assert (rounded - W * size).norm() < bound * (W * size).norm()


@pytest.mark.few(24)
@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("value", [0.0, 0.5, -0.5, 1e-40])
def test_constant_weights_are_finite_on_every_grid(name, value):
    W = torch.full((4, 256), value)
    rounded = rtn(W, GRIDS[name]).dequantize()
    assert rounded.isfinite().all() and (rounded - W).abs().max() <= 0.16 * abs(value) + 1e-6


def test_a_group_of_nvfp4_far_below_the_largest_weight_keeps_its_content():
    W = torch.full((1, 32), 1e-6)
    W[0, 0] = 1.0
    rounded = rtn(W, NVFP4Grid()).dequantize()
    small = rtn(torch.full((1, 16), 2e-6), NVFP4Grid(peak=1.0)).dequantize()
    assert rounded[0, 0] == pytest.approx(1.0, rel=1e-3) and (small > 0).all()
