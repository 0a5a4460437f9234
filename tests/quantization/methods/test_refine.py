"""Refinement: every step lowers the layer's error; nothing a single code could do is left."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attar.quantization.grids import IntGrid, NF4Grid, NVFP4Grid
from attar.quantization.grids.fp4 import MXFP4Grid
from attar.quantization.grids.ggml import GGML
from attar.quantization.hessian import CrossHessian, Hessian, output_error
from attar.quantization.methods.gptq import gptq
from attar.quantization.methods.refine import refine, refit_scales, start, sweep_columns
from attar.quantization.methods.rtn import rtn


def layer(rows=16, columns=64, tokens=800, seed=0):
    g = torch.Generator().manual_seed(seed)
    mix = torch.eye(columns) + 0.4 * torch.randn(columns, columns, generator=g)
    X = (torch.randn(tokens, columns, generator=g) * torch.linspace(0.2, 2.0, columns)) @ mix
    h = Hessian(columns)
    h.add(X)
    return torch.randn(rows, columns, generator=g) * 0.1, h.value(), X


def step(quantized, H, B, how):
    descent = start(quantized, H, B)
    how(descent)
    return descent.quantized()


def descend(quantized, H, B):
    return step(quantized, H, B, sweep_columns)


def refit(quantized, H, B):
    return step(quantized, H, B, refit_scales)


def output_cost(quantized, H, B):
    """f by its definition."""
    W, H, B = quantized.dequantize().double(), H.double(), B.double()
    return float(((W @ H - 2.0 * B) * W).sum())


Q4_K, Q6_K = GGML["Q4_K"], GGML["Q6_K"]
GRIDS = [IntGrid(3, 16), IntGrid(4, 16, symmetric=False), IntGrid(2, 0), NF4Grid(64), NVFP4Grid()]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_pass_lowers_the_error(grid):
    W, H, _ = layer()
    B = W @ H
    result = gptq(W, H, grid).quantized
    costs = [output_cost(result, H, B)]
    for improve in (descend, refit, descend, refit, descend):
        result = improve(result, H, B)
        costs.append(output_cost(result, H, B))
    slack = 1e-4 * abs(costs[0])
    assert all(after <= before + slack for before, after in itertools.pairwise(costs)), costs
    before = output_error(W, gptq(W, H, grid).quantized.dequantize(), H)
    assert output_error(W, refine(gptq(W, H, grid).quantized, H, B, weight=W).dequantize(), H) < before


def test_one_pass_is_coordinate_descent_by_hand():
    W, H, _ = layer(rows=5, columns=24)
    grid = IntGrid(3, 8)
    start = rtn(W, grid)
    ours = descend(start, H, W @ H)
    s = start.parameters.scale.double().repeat_interleave(8, 1)
    Wd, Hd, q = W.double(), H.double(), start.codes.double()
    for k in range(24):
        slope = ((q * s - Wd) @ Hd)[:, k]
        q[:, k] = ((q[:, k] * s[:, k] - slope / Hd[k, k]) / s[:, k]).round().clamp(-4, 3)
    assert (ours.codes != q.to(torch.int8)).sum() <= 1


def test_no_single_code_can_do_better_once_it_has_settled():
    W, H, _ = layer(rows=4, columns=24)
    grid = IntGrid(3, 8)
    result, B = rtn(W, grid), W @ H
    for _ in range(30):
        result = descend(result, H, B)
    s = result.parameters.scale.repeat_interleave(8, 1)
    base = ((result.codes * s - W) @ H * (result.codes * s - W)).sum(1)
    for k in range(24):
        for change in (-1, 1):
            other = result.codes.float().clone()
            other[:, k] = (other[:, k] + change).clamp(-4, 3)
            E = other * s - W
            assert ((E @ H * E).sum(1) >= base * (1 - 1e-4)).all()


def test_refitted_scales_are_the_least_squares_ones():
    W, H, _ = layer(rows=6, columns=32)
    quantized = rtn(W, IntGrid(3, 8))
    ours = refit(quantized, H, W @ H).parameters.scale
    L = torch.linalg.cholesky(H.double())
    for row in range(6):
        C = torch.zeros(32, 4, dtype=torch.float64)
        for g in range(4):
            C[g * 8 : (g + 1) * 8, g] = quantized.codes[row, g * 8 : (g + 1) * 8].double()
        wanted = torch.linalg.lstsq(L.T @ C, L.T @ W[row].double()[:, None]).solution[:, 0]
        assert torch.allclose(ours[row].double(), wanted, rtol=2e-3)


def test_asymmetric_target_is_the_original_output():
    """With B = W C the codes approach the original model's output, not that of the disturbed inputs."""
    W, _, X = layer(tokens=2000)
    disturbed = 1.1 * X + 0.3 * torch.randn(X.shape, generator=torch.Generator().manual_seed(5))
    seen = CrossHessian(64)
    seen.add(disturbed, X)
    H, C = seen.value(), seen.cross()
    start = gptq(W, H, IntGrid(4, 16)).quantized
    wanted = X @ W.T

    def miss(quantized):
        return float((disturbed @ quantized.dequantize().T - wanted).square().sum())

    assert miss(refine(start, H, W @ C)) < 0.9 * miss(refine(start, H, W @ H))


def test_a_mask_is_kept():
    W, H, _ = layer()
    mask = torch.rand(W.shape, generator=torch.Generator().manual_seed(1)) > 0.5
    start = gptq(W * mask, H, IntGrid(4, 16), mask=mask).quantized
    refined = refine(start, H, W @ H, weight=W, mask=mask)
    assert (refined.codes[~mask] == 0).all()
    assert output_error(W, refined.dequantize(), H) < output_error(W, start.dequantize(), H)


def test_inputs_are_untouched():
    W, H, _ = layer()
    start = gptq(W, H, IntGrid(4, 16)).quantized
    kept = H.clone(), start.codes.clone()
    refine(start, H, W @ H, weight=W)
    assert torch.equal(H, kept[0]) and torch.equal(start.codes, kept[1])


class Largest(TorchDispatchMode):
    """The most bytes of any tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self.bytes = max(self.bytes, value.numel() * value.element_size())
        return result


@pytest.mark.parametrize("grid", [NVFP4Grid(), MXFP4Grid(), Q4_K, Q6_K], ids=repr)
def test_where_scales_are_not_free_no_system_is_built(grid):
    g = torch.Generator().manual_seed(0)
    W, H = torch.randn(64, 1024, generator=g) * 0.1, torch.eye(1024)
    quantized = rtn(W, grid)
    with Largest() as seen:
        again = refit(quantized, H, W @ H)
    assert again.parameters is quantized.parameters
    assert seen.bytes <= W.nbytes, seen.bytes  # the systems of G = 64 groups take 4 times as much


@pytest.mark.parametrize("grid", [IntGrid(4, 16), IntGrid(3, 16, symmetric=False), NF4Grid(16)], ids=repr)
def test_systems_are_solved_for_some_rows_at_a_time(grid, monkeypatch):
    W, H, _ = layer(rows=96, columns=512)
    result, B = rtn(W, grid), W @ H
    whole = refit(result, H, B).parameters.scale
    monkeypatch.setattr("attar.quantization.methods.refine.BYTES", 2**18)  # 64 rows of 32 x 32 float32
    with Largest() as seen:
        parts = refit(result, H, B).parameters.scale
    assert not torch.equal(whole, result.parameters.scale)
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=0)
    assert seen.bytes <= max(2**18, W.nbytes), seen.bytes  # whole, the systems take 384 KiB


@pytest.mark.few(2)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("grid", [*GRIDS, MXFP4Grid()], ids=str)
def test_rows_refined_in_parts_are_those_refined_together(monkeypatch, grid, masked):
    W, H, _ = layer()
    mask = torch.arange(W.numel()).reshape(W.shape) % 3 > 0 if masked else None
    rounded, before = gptq(W, H, grid, mask=mask).quantized, H.clone()
    together = refine(rounded, H, 1.1 * W @ H, weight=W, mask=mask)
    assert torch.equal(H, before)
    monkeypatch.setattr("attar.quantization.methods.refine.WEIGHTS", 5 * W.shape[1])
    parts = refine(rounded, H, 1.1 * W @ H, weight=W, mask=mask)
    assert torch.allclose(parts.dequantize(), together.dequantize(), atol=1e-4)
    assert (parts.codes == together.codes).float().mean() > 0.98
    assert parts.parameters.stored.keys() == rounded.parameters.stored.keys()


def test_a_row_whose_refitted_scales_are_worse_once_they_are_stored_keeps_its_old_ones():
    """bfloat16 rounds eight scales of a row at once: neighbours of the rounded solution may be better."""
    W, H, _ = layer(rows=64)
    B = (W @ H).double()
    first = refit(rtn(W, IntGrid(3, 8, storage=torch.bfloat16)), H, B.float())

    def costs(scale):
        D = (first.codes * scale.repeat_interleave(8, 1)).double()
        return ((D @ H.double() - 2 * B) * D).sum(1)

    best = first.parameters.scale
    for group in range(8):
        for ulp in (1 + 2**-7, 1 - 2**-7):
            trial = best.clone()
            trial[:, group] = (trial[:, group] * ulp).bfloat16().float()
            best = torch.where((costs(trial) < costs(best) - 1e-6)[:, None], trial, best)
    better = (best != first.parameters.scale).any(1)
    assert better.sum() > 5
    again = refit(replace(first, parameters=replace(first.parameters, scale=best)), H, B.float())
    assert (costs(again.parameters.scale) <= costs(best) + 1e-6).all()
