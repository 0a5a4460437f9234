"""The loop over columns in Triton's interpreter, against the C++ loop."""

import pytest
import torch

from attar.kernels import triton
from attar.kernels.build import load
from attar.quantization.grids import GGML, IntGrid
from attar.quantization.grids.real import RealGrid
from attar.quantization.hessian import Hessian
from attar.quantization.methods.gptq import gptq
from attar.quantization.methods.qronos import qronos
from attar.quantization.methods.refine import refine
from attar.sparsity import parse_sparsity

GRIDS = [
    IntGrid(2, 32),
    IntGrid(3, 0),
    IntGrid(4, 64, symmetric=False, storage=torch.bfloat16),
    IntGrid(8, 128, rows=0),
    GGML["Q4_K"],
    GGML["IQ4_NL"],
]


def layer(rows, columns):
    """A weight, and the H of correlated inputs."""
    mix = torch.eye(columns) + torch.randn(columns, columns) / columns**0.5
    seen = Hessian(columns)
    seen.add((torch.randn(3 * columns, columns) * torch.linspace(0.2, 2.0, columns)) @ mix)
    return torch.randn(rows, columns) * 0.1, seen.value()


def both(monkeypatch, run):
    """What a function gives in the interpreter, and in C++."""
    assert load("columns") is not None, "the C++ loop is what it is compared with"
    assert triton.available(torch.device("cpu"))
    ours = run()
    with monkeypatch.context() as patch:
        patch.setattr(triton, "available", lambda device: False)
        return ours, run()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_codes_are_those_of_the_compiled_loop(grid, monkeypatch):
    W, H = layer(19, 256 if grid in (GGML["Q4_K"], GRIDS[3]) else 160)
    mask = torch.rand(W.shape) > 0.5 if grid in GRIDS[2:5] else None
    W = W if mask is None else W * mask
    parameters = grid.choose(W, importance=H.diagonal())

    def run():
        start = gptq(W, H, grid, parameters=parameters, mask=mask).quantized
        return start.codes, refine(start, H, weight=W, mask=mask, sweeps=1).codes

    for ours, theirs in zip(*both(monkeypatch, run), strict=True):
        assert torch.equal(ours, theirs)


def test_the_first_column_may_be_decided_elsewhere(monkeypatch):
    W, H = layer(20, 96)
    cross = H + 0.1 * torch.randn(H.shape) * H.diagonal().mean()
    ours, theirs = both(monkeypatch, lambda: qronos(W, H, cross, IntGrid(4, 32)).quantized.codes)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("grid", [RealGrid(), IntGrid(4, 32)], ids=str)
def test_half_of_the_weights_become_zero(grid, monkeypatch):
    W, H = layer(18, 160)
    runs = both(monkeypatch, lambda: gptq(W, H, grid, sparsity=parse_sparsity("0.5")))
    assert torch.equal(runs[0].mask, runs[1].mask)
    torch.testing.assert_close(*(run.quantized.dequantize() for run in runs), rtol=1e-4, atol=1e-6)
