"""One Linear at a time: every method forms its groups in the order of importance where that is asked for."""

import pytest
import torch

from attar.pruning.solvers.sparsegpt import sparsegpt
from attar.quantization import layerwise
from attar.quantization.grids import Float8Grid, IntGrid, MXFP4Grid, NF4Grid, NVFP4Grid
from attar.quantization.hessian import CrossHessian, Hessian, output_error
from attar.quantization.layerwise import LayerSolver, masked
from attar.quantization.methods.rtn import rtn
from attar.quantization.rounding import METHODS
from attar.quantization.settings import GROUP_ORDERED, quantize_settings
from attar.sparsity import parse_sparsity

K, N, GROUP = 64, 16, 16
GRID = IntGrid(3, GROUP)


def layer(seed=0):
    """A weight and inputs whose sizes differ by channel, in no order."""
    g = torch.Generator().manual_seed(seed)
    size = torch.logspace(-1, 1, K)[torch.randperm(K, generator=g)]
    mix = torch.eye(K) + 0.3 * torch.randn(K, K, generator=g) / K**0.5
    X = torch.randn(600, K, generator=g) @ mix * size
    return torch.randn(N, K, generator=g) * 0.1 / size.sqrt(), X


def solver(method, act_order, names=("layer",), **options):
    g = torch.Generator().manual_seed(1)
    H_O = torch.randn(N, 4 * N, generator=g)
    settings = quantize_settings(method=method, act_order=act_order, **options).rounding
    curvature = (lambda _: H_O @ H_O.T) if method == "yaqa" else None
    return LayerSolver(dict.fromkeys(names, GRID), METHODS[method], settings, output_hessian=curvature)


def statistics(solver, X, order=slice(None)):
    seen = solver.accumulator(["layer"], K)
    behind = (X + 0.05 * torch.randn(X.shape, generator=torch.Generator().manual_seed(2)))[:, order]
    seen.add(behind, X[:, order]) if isinstance(seen, CrossHessian) else seen.add(behind)
    return seen


@pytest.mark.parametrize("method", GROUP_ORDERED)
def test_group_order_is_the_method_on_sorted_columns(method):
    W, X = layer()
    ours, plain = solver(method, "group"), solver(method, "static")
    seen = statistics(ours, X)
    order = torch.argsort(seen.value().diagonal(), descending=True, stable=True)
    got = ours.solve({"layer": W}, seen)["layer"]
    wanted = plain.solve({"layer": W[:, order]}, statistics(plain, X, order))["layer"]
    assert torch.equal(got.tensors["g_idx"][order], torch.arange(K) // GROUP)
    same = (got.tensors["codes"][:, order] == wanted.tensors["codes"]).float().mean()
    assert same > 0.99  # sums in another order
    assert torch.equal(ours.restore("layer", got.tensors), got.weight)
    scale = got.tensors["scale"][:, got.tensors["g_idx"]]
    assert torch.equal(got.weight, got.tensors["codes"] * scale)


@pytest.mark.parametrize("act_order", ["off", "static", "group"])
@pytest.mark.parametrize("method", GROUP_ORDERED)
def test_weights_and_statistics_are_not_modified(method, act_order):
    """The weights are the model's own, and the Hessian is factorized and damped in its memory."""
    W, X = layer()
    ours = solver(method, act_order)
    seen = statistics(ours, X)
    before, H = W.clone(), seen.value()
    got = ours.solve({"layer": W}, seen)["layer"]
    assert torch.equal(W, before) and torch.equal(seen.final(), H)
    assert got.weight.data_ptr() != W.data_ptr()


@pytest.mark.parametrize("method", ["gptaq", "qronos"])
def test_a_part_of_what_the_layers_before_lost_is_made_up_for(method):
    W, X = layer()
    gptq = solver("gptq", "static")
    wanted = gptq.solve({"layer": W}, statistics(gptq, X))["layer"].tensors["codes"]
    apart = {}
    for part in (0.0, 0.25, 1.0):
        ours = solver(method, "static", correct=part)
        codes = ours.solve({"layer": W}, statistics(ours, X))["layer"].tensors["codes"]
        apart[part] = float((codes != wanted).float().mean())
    assert apart[0.0] == 0 < apart[0.25] < apart[1.0]


@pytest.mark.parametrize("sparse", [False, True])
def test_large_weights_are_rounded_one_by_one_to_the_same_codes(monkeypatch, sparse):
    weights = {name: layer(seed)[0] for seed, name in enumerate("qkv")}
    X = layer()[1]
    ours = pruner(GRID, "2:4", names=weights) if sparse else solver("gptq", "static", weights)
    together = ours.solve(dict(weights), statistics(ours, X))
    monkeypatch.setattr(layerwise, "STACKED", 2 * N * K)
    alone = ours.solve(dict(weights), statistics(ours, X))
    for name in weights:
        same = alone[name].tensors["codes"] == together[name].tensors["codes"]
        assert same.float().mean() > 0.99
        assert alone[name].report["error"] == pytest.approx(together[name].report["error"], rel=0.05)


def pruner(grid, amount, act_order="static", names=("layer",), **options):
    settings = quantize_settings(sparsity=amount, act_order=act_order, **options).rounding
    return LayerSolver(dict.fromkeys(names, grid), METHODS["gptq"], settings)


SPARSE_GRIDS = [
    IntGrid(4, GROUP),
    IntGrid(4, GROUP, symmetric=False, storage=torch.bfloat16),
    IntGrid(8, 0),
    IntGrid(8, 0, rows=0),
    NF4Grid(GROUP),
    NF4Grid(GROUP, double=True),
    Float8Grid("e4m3fn", 0, 1),
    NVFP4Grid(),
    MXFP4Grid(),
]


@pytest.mark.few(5)
@pytest.mark.parametrize("act_order", ["off", "static", "group"])
@pytest.mark.parametrize("amount", ["0.5", "2:4", "4:8"])
@pytest.mark.parametrize("grid", SPARSE_GRIDS, ids=str)
def test_mask_and_codes_of_one_pass_give_exact_zeros_in_stored_order(grid, amount, act_order):
    W, X = layer()
    ours = pruner(grid, amount, act_order)
    got = ours.solve({"layer": W}, statistics(ours, X))["layer"]
    decoded = ours.restore("layer", got.tensors)
    assert torch.equal(decoded, got.weight)
    stays = decoded != 0
    sparsity = parse_sparsity(amount)
    if sparsity.of:
        assert (stays.unflatten(1, (-1, sparsity.of)).sum(-1) <= sparsity.kept).all()
    assert (~stays).float().mean() >= 0.5
    assert got.report["sparsity"] == pytest.approx(float((~stays).float().mean()))
    assert got.report["error"] < got.report["rtn_error"]


@pytest.mark.parametrize("amount", ["0.5", "2:4"])
def test_linears_with_the_same_inputs_each_have_the_asked_sparsity(amount):
    W, X = layer()
    weights = {"large": W, "small": 0.01 * layer(seed=5)[0]}  # one threshold would empty the small one
    ours = pruner(IntGrid(8, GROUP), amount, names=weights)
    got = ours.solve(dict(weights), statistics(ours, X))
    for name, weight in weights.items():
        alone = pruner(IntGrid(8, GROUP), amount, names=[name])
        wanted = alone.solve({name: weight}, statistics(alone, X))[name]
        assert got[name].report["sparsity"] == pytest.approx(0.5, abs=0.02)
        assert (got[name].tensors["codes"] != wanted.tensors["codes"]).float().mean() < 0.01


@pytest.mark.parametrize("grid", [IntGrid(4, GROUP), IntGrid(8, 0)], ids=str)
def test_one_pass_loses_less_than_rounding_a_pruned_weight_to_nearest(grid):
    W, X = layer()
    ours = pruner(grid, "2:4")
    seen = statistics(ours, X)
    got = ours.solve({"layer": W}, seen)["layer"]
    pruned = sparsegpt(W, seen.value(), parse_sparsity("2:4"))
    nearest = masked(rtn(pruned, grid), pruned != 0).dequantize()
    assert output_error(W, got.weight, seen.value()) < output_error(W, nearest, seen.value())


def test_scales_are_searched_and_codes_refined_in_group_order_too():
    """They were switched off there, and the card said that they had been on."""
    W, X = layer()
    errors = {}
    for refine, scales in ((0, "absmax"), (0, "output"), (4, "output")):
        grids = solver("gptq", "group").grids
        settings = quantize_settings(method="gptq", act_order="group", refine=refine, scales=scales)
        one = LayerSolver(grids, METHODS["gptq"], settings.rounding)
        seen = statistics(one, X)
        dense = one.solve({"layer": W}, seen)["layer"].weight
        errors[refine, scales] = output_error(W, dense, seen.value())
    assert errors[4, "output"] < errors[0, "output"] < 0.95 * errors[0, "absmax"], errors


@pytest.mark.parametrize("kind", [Hessian, CrossHessian])
def test_statistics_in_another_order_are_those_of_permuted_inputs(kind):
    _, X = layer()
    order = torch.randperm(K, generator=torch.Generator().manual_seed(3))
    seen, permuted = kind(K), kind(K)
    for to, inputs in ((seen, X), (permuted, X[:, order])):
        to.add(inputs, inputs * 0.9) if kind is CrossHessian else to.add(inputs)
    again = seen.ordered(order)
    torch.testing.assert_close(again.value(), permuted.value())
    assert again.tokens == seen.tokens
    if kind is CrossHessian:
        torch.testing.assert_close(again.cross(), permuted.cross())
