"""YAQA against the paper's rule entry by entry in float64, and against GPTQ where it is GPTQ."""

import pytest
import torch

from attar.errors import NumericsError
from attar.quantization.grids import IntGrid
from attar.quantization.methods.gptq import gptq
from attar.quantization.methods.yaqa import yaqa

DAMP = 0.01


def kronecker_error(weight, rounded, H_O, H_I):
    """tr(E^T H_O E H_I) / tr(W^T H_O W H_I) with E = W - W': what a change costs, relative to leaving the
    layer out (0: exact)."""
    W = weight.float()
    lost, whole = (
        float(((H_O @ part @ H_I).double() * part.double()).sum()) for part in (W - rounded.float(), W)
    )
    return max(lost, 0.0) / max(whole, 1e-30)


def factor(size, seed, spread=True):
    """A positive definite matrix with strong correlations."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.eye(size) + 0.4 * torch.randn(size, size, generator=g)
    X = torch.randn(6 * size, size, generator=g)
    X = (X * torch.linspace(0.2, 2.0, size) if spread else X) @ mix
    return X.T @ X / len(X)


def weight(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.1


def upper_factor(H):
    """L, unit triangular with H = L D L^T; upper, so that the first row (or column) is rounded first."""
    H = H.double()
    H = H + DAMP * H.diagonal().mean() * torch.eye(len(H), dtype=torch.float64)
    R = torch.linalg.cholesky(H.flip(0, 1)).flip(0, 1)
    return R / R.diagonal()


def by_the_paper(W, H_O, H_I, grid, parameters, rows, columns, target=None):
    """The paper's rule, entry by entry in the order given: round W* + L_O'^T E L_I' + L_O'^T E + E L_I', with
    E = W* - W."""
    aim = (W if target is None else target).double()[rows][:, columns]
    L_O, L_I = upper_factor(H_O[rows][:, rows]), upper_factor(H_I[columns][:, columns])
    by_row = grid.by_row(parameters, len(W))
    E, codes = torch.zeros_like(aim), torch.zeros(W.shape)
    for i in range(len(rows)):
        for k in range(len(columns)):
            value = aim[i, k] + L_O[: i + 1, i] @ E[: i + 1, : k + 1] @ L_I[: k + 1, k]
            row, column = int(rows[i]), int(columns[k])
            at = by_row.map(lambda x, r=row, c=column: x[r, c // (grid.group_size or len(columns))])
            codes[row, column] = grid.encode(value.float(), at)
            E[i, k] = aim[i, k] - grid.decode(codes[row, column], at).double()
    return codes


def ordered(H, act_order):
    return torch.argsort(H.diagonal(), descending=True, stable=True) if act_order else torch.arange(len(H))


@pytest.mark.few(8)
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("grid", [IntGrid(3, 8), IntGrid(4, 0), IntGrid(3, 8, False), IntGrid(4, 8, rows=4)])
@pytest.mark.parametrize("tile", [4, 32])
@pytest.mark.parametrize("shape", [(12, 24), (13, 17)])
def test_agrees_with_the_papers_rule_entry_by_entry(shape, tile, grid, act_order, monkeypatch):
    monkeypatch.setattr("attar.quantization.methods.yaqa.TILE", tile)
    W, H_O, H_I = weight(*shape), factor(shape[0], 1), factor(shape[1], 2)
    result = yaqa(W, H_O, H_I, grid, damp=DAMP, act_order=act_order).quantized
    rows, columns = ordered(H_O, act_order), ordered(H_I, act_order)
    wanted = by_the_paper(W, H_O, H_I, grid, result.parameters, rows, columns)
    differing = (wanted != result.codes).sum()
    assert differing <= 2, f"{differing} of {wanted.numel()} codes differ"


@pytest.mark.parametrize("shape", [(24, 32), (70, 100), (1, 8), (40, 1)])
def test_an_identity_output_factor_is_gptq(shape):
    W, H = weight(*shape), factor(shape[1], 2)
    for grid in (IntGrid(3, 8), IntGrid(4, 0, symmetric=False)):
        ours = yaqa(W, torch.eye(len(W)), H, grid, act_order=False).quantized
        assert torch.equal(ours.codes, gptq(W, H, grid, act_order=False).quantized.codes)


def test_the_two_sides_are_alike():
    """Transposing the weight and exchanging the factors transposes the codes."""
    W, H_O, H_I = weight(40, 70), factor(40, 1), factor(70, 2)
    grid = IntGrid(4, 0, rows=0)  # one scale, so that the grid has no direction
    ours = yaqa(W, H_O, H_I, grid).quantized.codes
    turned = yaqa(W.T, H_I, H_O, grid).quantized.codes
    assert (ours != turned.T).float().mean() < 0.001


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_beats_gptq_on_the_two_sided_error(bits):
    ours = theirs = 0.0
    for seed in range(4):
        W, H_O, H_I = weight(48, 64, seed), factor(48, seed + 10), factor(64, seed + 20)
        grid = IntGrid(bits, 32)
        ours += kronecker_error(W, yaqa(W, H_O, H_I, grid).quantized.dequantize(), H_O, H_I)
        theirs += kronecker_error(W, gptq(W, H_I, grid).quantized.dequantize(), H_O, H_I)
    assert ours < 0.7 * theirs


def test_kronecker_error_is_the_quadratic_form():
    W, E = weight(5, 6), 0.1 * weight(5, 6, seed=1)
    H_O, H_I = factor(5, 1), factor(6, 2)
    big = torch.kron(H_O, H_I).double()
    whole, lost = (float(v.double().flatten() @ big @ v.double().flatten()) for v in (W, E))
    assert kronecker_error(W, W - E, H_O, H_I) == pytest.approx(lost / whole, rel=1e-4)


def test_the_scale_of_the_factors_does_not_matter():
    W, H_O, H_I = weight(20, 32), factor(20, 1), factor(32, 2)
    first = yaqa(W, H_O, H_I, IntGrid(3, 8)).quantized.codes
    assert torch.equal(first, yaqa(W, 1024 * H_O, H_I / 4096, IntGrid(3, 8)).quantized.codes)


def test_a_target_moves_the_codes_and_not_the_parameters():
    W, H_O, H_I = weight(12, 24), factor(12, 1), factor(24, 2)
    target, grid = W + 0.02 * weight(12, 24, seed=5), IntGrid(4, 8)
    result = yaqa(W, H_O, H_I, grid, target=target).quantized
    assert torch.equal(result.parameters.scale, grid.choose(W).scale)
    order = ordered(H_O, True), ordered(H_I, True)
    wanted = by_the_paper(W, H_O, H_I, grid, result.parameters, *order, target=target)
    assert (wanted != result.codes).sum() <= 2


def test_unseen_columns_are_rounded_to_nearest_and_idle_rows_by_themselves():
    W, H_O, H_I = weight(12, 24), factor(12, 1), factor(24, 2)
    H_I[[4, 9]] = H_I[:, [4, 9]] = 0.0
    H_O[3] = H_O[:, 3] = 0.0
    quantized = yaqa(W, H_O, H_I, IntGrid(4, 8))
    nearest = IntGrid(4, 8).quantize(W, quantized.quantized.parameters).codes
    assert torch.equal(quantized.quantized.codes[3, [4, 9]], nearest[3, [4, 9]]) and nearest[3, [4, 9]].any()
    assert torch.equal(quantized.quantized.codes[3], gptq(W[3:4], H_I, IntGrid(4, 8)).quantized.codes[0])


def test_given_parameters_and_mask_are_kept():
    W, H_O, H_I, grid = weight(12, 24), factor(12, 1), factor(24, 2), IntGrid(4, 8)
    parameters, mask = grid.choose(W, shrink=0.8), W.abs() > 0.05
    result = yaqa(W * mask, H_O, H_I, grid, parameters=parameters, mask=mask).quantized
    assert result.parameters is parameters
    assert (result.dequantize()[~mask] == 0).all() and (result.dequantize()[mask] != 0).any()


def test_damping_is_raised_and_reported():
    W, H_I = weight(12, 24), factor(24, 2)
    thin = torch.ones(12, 12)  # rank 1
    quantized = yaqa(W, thin, H_I, IntGrid(4, 8), damp=0.0)
    assert quantized.damp == 0.0  # H_O's damping was raised alone


@pytest.mark.parametrize("where", ["weight", "output", "input"])
def test_nan_is_refused(where):
    W, H_O, H_I = weight(12, 24), factor(12, 1), factor(24, 2)
    {"weight": W, "output": H_O, "input": H_I}[where][0, 0] = float("nan")
    with pytest.raises(NumericsError, match="NaN"):
        yaqa(W, H_O, H_I, IntGrid(4, 8))


def test_inputs_are_untouched_and_the_same_call_gives_the_same_codes():
    W, H_O, H_I = weight(12, 24), factor(12, 1), factor(24, 2)
    H_I[4] = H_I[:, 4] = 0.0
    before = W.clone(), H_O.clone(), H_I.clone()
    first, second = (yaqa(W, H_O, H_I, IntGrid(4, 8)).quantized.codes for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(before, (W, H_O, H_I), strict=True))
    assert torch.equal(first, second)
