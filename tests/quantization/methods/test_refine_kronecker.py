"""Refinement under both Hessians: by hand in float64, and what no step may do."""

import pytest
import torch

from attar.quantization.grids import IntGrid, NF4Grid, NVFP4Grid
from attar.quantization.grids.fp4 import MXFP4Grid
from attar.quantization.grids.ggml import GGML
from attar.quantization.methods import refine_kronecker as both
from attar.quantization.methods.refine import start, sweep_columns
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


def by_hand(started, target, H_O, H_I, sweeps, mask):
    """Codes entry by entry, in float64."""
    grid, codes, current = started.grid, started.codes.double(), started.dequantize().double()
    D, H = damped(H_O, 0.1), damped(H_I, 0.01)
    group = torch.arange(codes.shape[1]) // (grid.group_size or codes.shape[1])
    spread = grid.by_row(started.parameters, len(codes)).map(lambda value: value[:, group])
    for _ in range(sweeps):
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
    if mask is not None and grid != Q5_1:  # which has no zero
        assert not ours.dequantize()[~mask].any()


@pytest.mark.parametrize("grid", [IntGrid(3, 16), NF4Grid(64)], ids=str)
def test_without_a_compiled_loop_codes_stay(grid, monkeypatch):
    W, H_O, H_I = problem(rows=20)
    started = rtn(W, grid)
    if not isinstance(grid, NF4Grid):
        monkeypatch.setattr(both, "compiled_tiles", lambda *_: None)
    assert torch.equal(refine_kronecker(started, H_O, H_I, W, **DAMPING).codes, started.codes)


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
