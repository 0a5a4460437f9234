"""One Linear at a time: every method forms its groups in the order of importance where that is asked for."""

import pytest
import torch

from attar.quantization.grids import IntGrid
from attar.quantization.hessian import CrossHessian, Hessian, output_error
from attar.quantization.layerwise import LayerSolver
from attar.quantization.plan import LayerPlan
from attar.quantization.rounding import METHODS
from attar.quantization.schemes import SCHEMES
from attar.quantization.settings import GROUP_ORDERED, quantize_settings

K, N, GROUP = 64, 16, 16
GRID = IntGrid(3, GROUP)


def layer(seed=0):
    """A weight and inputs whose sizes differ by channel, in no order."""
    g = torch.Generator().manual_seed(seed)
    size = torch.logspace(-1, 1, K)[torch.randperm(K, generator=g)]
    mix = torch.eye(K) + 0.3 * torch.randn(K, K, generator=g) / K**0.5
    X = torch.randn(600, K, generator=g) @ mix * size
    return torch.randn(N, K, generator=g) * 0.1 / size.sqrt(), X


def solver(method, act_order):
    site = LayerPlan("layer", (N, K), False, GRID, SCHEMES["W3A16"].sized(GROUP), torch.float32)
    g = torch.Generator().manual_seed(1)
    H_O = torch.randn(N, 4 * N, generator=g)
    settings = quantize_settings(method=method, act_order=act_order).rounding
    curvature = (lambda _: H_O @ H_O.T) if method == "yaqa" else None
    return LayerSolver({"layer": site}, METHODS[method], settings, output_hessian=curvature)


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


def test_scales_are_searched_and_codes_refined_in_group_order_too():
    """They were switched off there, and the card said that they had been on."""
    W, X = layer()
    errors = {}
    for refine, scales in ((0, "absmax"), (0, "output"), (4, "output")):
        layers = solver("gptq", "group").layers
        settings = quantize_settings(method="gptq", act_order="group", refine=refine, scales=scales)
        one = LayerSolver(layers, METHODS["gptq"], settings.rounding)
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
