"""Refinement under both Hessians: by hand in float64, and what no step may do."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from attar.quantization.grids import IntGrid, NF4Grid, NVFP4Grid, QuantizedTensor
from attar.quantization.grids.fp4 import MXFP4Grid
from attar.quantization.grids.ggml import GGML
from attar.quantization.methods import refine_kronecker as both
from attar.quantization.methods.refine import refit_scales, start, sweep_columns
from attar.quantization.methods.refine_kronecker import refine_kronecker
from attar.quantization.methods.rtn import rtn
from attar.quantization.methods.yaqa import yaqa
from tests.quantization.methods.test_yaqa import factor, weight

DAMPING = {"damp": 0.01, "damp_output": 0.1}
Q5_1 = GGML["Q5_1"]
GRIDS = [IntGrid(3, 16), IntGrid(4, 16, symmetric=False), IntGrid(2, 0), NVFP4Grid(), MXFP4Grid(), Q5_1]


def problem(rows=40, columns=64, seed=0):
    return weight(rows, columns, seed), factor(rows, seed + 1), factor(columns, seed + 2)


def damped(H, damp):
    H = H.double()
    return H + damp * H.diagonal().mean() * torch.eye(len(H), dtype=torch.float64)


def cost(quantized, target, H_O, H_I):
    """f by its definition."""
    E = quantized.dequantize().double() - target.double()
    return float(((damped(H_O, 0.1) @ E @ damped(H_I, 0.01)) * E).sum()) / 2


def refitted(grid, parameters, codes, slope, D, H):
    """New scales (N, G): of each row by its normal equations, the others fixed, in float64."""
    unit = QuantizedTensor(grid, codes, replace(parameters, scale=torch.ones_like(parameters.scale)))
    scale = parameters.scale.double()
    groups = unit.dequantize().double().view(len(codes), scale.shape[1], -1)
    for i, u in enumerate(groups):
        each = torch.block_diag(*u)  # (G, K)
        scale[i] -= torch.linalg.lstsq(D[i, i] * each @ H @ each.T, each @ slope[i]).solution
    return grid.rescaled(parameters, scale.float())


def by_hand(started, target, H_O, H_I, sweeps, mask):
    """Codes entry by entry, and scales between the passes, in float64."""
    grid, codes, current = started.grid, started.codes.double(), started.dequantize().double()
    D, H, parameters = damped(H_O, 0.1), damped(H_I, 0.01), started.parameters
    group = torch.arange(codes.shape[1]) // (grid.group_size or codes.shape[1])
    for sweep in range(sweeps):
        if sweep and grid.rescaled(parameters, parameters.scale) is not None:
            slope = D @ (current - target.double()) @ H
            parameters = refitted(grid, parameters, codes, slope, D, H)
            current = QuantizedTensor(grid, codes, parameters).dequantize().double()
        spread = grid.by_row(parameters, len(codes)).map(lambda value: value[:, group])
        for k in range(codes.shape[1]):
            for i in range(len(codes)):
                slope = D[i] @ (current - target.double()) @ H[:, k]
                wanted = current[i, k] - slope / (D[i, i] * H[k, k])
                wanted = wanted if mask is None or mask[i, k] else torch.zeros(())
                at = spread.map(lambda value, i=i, k=k: value[i, k])
                codes[i, k] = code = grid.encode(wanted.float(), at)
                current[i, k] = grid.decode(code.float(), at)
    return codes


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_two_passes_are_coordinate_descent_by_hand(grid, masked):
    W, H_O, H_I = problem(rows=20)
    mask = torch.rand(W.shape, generator=torch.Generator().manual_seed(9)) > 0.4 if masked else None
    W = W if mask is None else W * mask
    started = yaqa(W, H_O, H_I, grid, mask=mask, **DAMPING).quantized
    ours = refine_kronecker(started, H_O, H_I, W, sweeps=2, mask=mask, **DAMPING)
    wanted = by_hand(started, W, H_O, H_I, 2, mask)
    assert (wanted != started.codes).sum() > 10
    assert (ours.codes.double() != wanted).sum() <= 3
    before, after = (cost(quantized, W, H_O, H_I) for quantized in (started, ours))
    assert after < before
    assert ours.parameters.stored == started.parameters.stored  # what a GGUF file holds
    if mask is not None and grid != Q5_1:  # which has no zero
        assert not ours.dequantize()[~mask].any()


@pytest.mark.parametrize("grid", [IntGrid(3, 16), NF4Grid(64)], ids=str)
def test_without_a_compiled_loop_codes_stay(grid, monkeypatch):
    W, H_O, H_I = problem(rows=20)
    started = rtn(W, grid)
    if not isinstance(grid, NF4Grid):
        monkeypatch.setattr(both, "compiled_tiles", lambda *_: None)
    assert torch.equal(refine_kronecker(started, H_O, H_I, W, **DAMPING).codes, started.codes)


@pytest.mark.parametrize("grid", [IntGrid(3, 16), IntGrid(4, 16, symmetric=False)], ids=str)
def test_every_pass_and_every_refit_of_scales_lowers_the_cost(grid, monkeypatch):
    W, H_O, H_I = problem()
    started = yaqa(W, H_O, H_I, grid, **DAMPING).quantized
    costs = [cost(refine_kronecker(started, H_O, H_I, W, sweeps=n, **DAMPING), W, H_O, H_I) for n in range(6)]
    assert all(after <= before for before, after in pairwise(costs))
    monkeypatch.setattr(both, "refit_scales", lambda *_: None)
    assert costs[-1] < cost(refine_kronecker(started, H_O, H_I, W, sweeps=100, **DAMPING), W, H_O, H_I)


def test_scales_that_would_lose_are_not_kept():
    """Equal rows that count as one: each alone would take the step of all."""
    W, H_I = weight(1, 64, 0).expand(40, -1).contiguous(), damped(factor(64, 2), 0.01).float()
    descent = start(rtn(W, IntGrid(3, 16)), H_I, None, W)
    before, alone = descent.parameters.scale, torch.eye(40)
    together = torch.ones(40, 40) + 1e-3 * alone
    descent.gradient = descent.gradient @ together
    refit_scales(descent, together)
    assert torch.equal(descent.parameters.scale, before)
    descent = start(rtn(W, IntGrid(3, 16)), H_I, None, W)
    refit_scales(descent, alone)
    assert not torch.equal(descent.parameters.scale, before)


def test_no_single_code_can_do_better_once_it_has_settled():
    W, H_O, H_I = problem(rows=6, columns=24)
    target = W + 0.01 * weight(6, 24, seed=7)
    result = refine_kronecker(rtn(W, IntGrid(3, 8)), H_O, H_I, target, sweeps=100, **DAMPING)
    assert torch.equal(refine_kronecker(result, H_O, H_I, target, **DAMPING).codes, result.codes)
    s, least = result.parameters.scale.repeat_interleave(8, 1), cost(result, target, H_O, H_I)
    D, H = damped(H_O, 0.1), damped(H_I, 0.01)
    for entry in range(W.numel()):
        for change in (-1, 1):
            codes = result.codes.float().flatten()
            codes[entry] = (codes[entry] + change).clamp(-4, 3)
            E = (codes.view(W.shape) * s - target).double()
            assert float(((D @ E @ H) * E).sum()) / 2 >= least * (1 - 1e-5)


def test_without_an_output_side_it_is_the_descent_of_a_layer():
    W, _, H_I = problem()
    started = rtn(W, IntGrid(3, 16))
    descent = start(started, damped(H_I, 0.01).float(), None, W)
    sweep_columns(descent)
    ours = refine_kronecker(started, torch.eye(len(W)), H_I, W, sweeps=1, **DAMPING)
    assert (ours.codes != descent.quantized().codes).sum() <= 1


def test_inputs_stay_as_they_were():
    W, H_O, H_I = problem()
    started = rtn(W, IntGrid(3, 16))
    given = [started.codes, H_O, H_I, W]
    copies = [value.clone() for value in given]
    assert not torch.equal(refine_kronecker(started, H_O, H_I, W, **DAMPING).codes, started.codes)
    assert all(torch.equal(value, copy) for value, copy in zip(given, copies, strict=True))
    assert torch.equal(refine_kronecker(started, H_O, H_I, W, sweeps=0, **DAMPING).codes, started.codes)
