"""GPTQ against a float64 brute force that shares no code with it."""

import pytest
import torch

from attar.errors import NumericsError
from attar.quantization.grids import IntGrid
from attar.quantization.hessian import Hessian, inverse_factor, output_error
from attar.quantization.layerwise import StackedLayers
from attar.quantization.methods.gptq import gptq
from attar.quantization.methods.rtn import rtn


def layer(rows=12, columns=32, tokens=400, seed=0):
    """A weight and correlated inputs."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.eye(columns) + 0.4 * torch.randn(columns, columns, generator=g)
    X = (torch.randn(tokens, columns, generator=g) * torch.linspace(0.2, 2.0, columns)) @ mix
    W = torch.randn(rows, columns, generator=g) * 0.1
    return W, X


def hessian(X):
    h = Hessian(X.shape[1])
    h.add(X)
    return h.value()


def obs_by_hand(W, H, scale, group, order, low, high, damp):
    """The optimal-brain-surgeon update, one column at a time, with the inverse of the remaining block taken
    afresh each time.

    Fix column i, give the remaining weights the best answer: w_R -= e * [H_R^-1]_{i, R} / [H_R^-1]_ii.
    """
    W = W.double().clone()
    H = H.double().clone()
    H += damp * H.diagonal().mean() * torch.eye(len(H), dtype=torch.float64)
    codes = torch.zeros(W.shape, dtype=torch.int8)
    remaining = order.tolist()
    while remaining:
        i = remaining[0]
        inverse = torch.linalg.inv(H[remaining][:, remaining])
        s = scale[:, group[i]].double()
        q = (W[:, i] / s).round().clamp(low, high)
        codes[:, i] = q.to(torch.int8)
        error = W[:, i] - q * s
        W[:, remaining] -= error[:, None] * inverse[0] / inverse[0, 0]
        remaining = remaining[1:]
    return codes


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group_size", [0, 8, 16])
@pytest.mark.parametrize("bits", [3, 4])
def test_agrees_with_brute_force(bits, group_size, act_order):
    W, X = layer()
    H = hessian(X)
    grid = IntGrid(bits, group_size)
    result = gptq(W, H, grid, damp=0.01, act_order=act_order)
    columns = torch.arange(32)
    order = torch.argsort(H.diagonal(), descending=True, stable=True) if act_order else columns
    group = columns // (group_size or 32)
    wanted = obs_by_hand(W, H, result.quantized.parameters.scale, group, order, grid.low, grid.high, 0.01)
    differing = (wanted != result.quantized.codes).sum()
    # float32 may break a tie the other way; one flip moves what follows in that row only
    assert differing <= 2, f"{differing} of {wanted.numel()} codes differ"


@pytest.mark.parametrize("columns", [32, 128, 160, 300])
def test_block_updates_equal_one_long_block(columns, monkeypatch):
    W, X = layer(columns=columns, tokens=900)
    H = hessian(X)
    blocked = gptq(W, H, IntGrid(4, 0))
    monkeypatch.setattr("attar.quantization.columns.BLOCK", 10_000)
    whole = gptq(W, H, IntGrid(4, 0))
    assert (blocked.quantized.codes != whole.quantized.codes).float().mean() < 0.01


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_beats_round_to_nearest(bits, symmetric):
    W, X = layer(rows=64, columns=128, tokens=1000)
    H = hessian(X)
    grid = IntGrid(bits, 32, symmetric)
    better = output_error(W, gptq(W, H, grid).quantized.dequantize(), H)
    nearest = output_error(W, rtn(W, grid).dequantize(), H)
    assert better < 0.6 * nearest


def test_identity_hessian_is_round_to_nearest():
    W, _ = layer()
    grid = IntGrid(4, 8)
    assert torch.equal(gptq(W, torch.eye(32), grid).quantized.codes, rtn(W, grid).codes)


def test_unseen_columns_are_rounded_to_nearest_and_change_no_other():
    W, X = layer()
    X[:, [4, 9]] = 0.0
    H = hessian(X)
    result = gptq(W, H, IntGrid(4, 8)).quantized
    nearest = IntGrid(4, 8).quantize(W, result.parameters)
    assert torch.equal(result.codes[:, [4, 9]], nearest.codes[:, [4, 9]]) and nearest.codes[:, [4, 9]].any()
    seen = [column for column in range(W.shape[1]) if column not in (4, 9)]
    errors = [(result.dequantize() - W)[:, seen], (nearest.dequantize() - W)[:, seen]]
    mine, plain = (float(((E @ H[seen][:, seen]) * E).sum()) for E in errors)
    assert mine < 0.9 * plain


def test_damping_is_raised_and_reported_when_the_hessian_is_singular():
    W, X = layer(columns=64)
    H = hessian(X[:5])  # rank 5
    result = gptq(W, H, IntGrid(4, 16), damp=0.0)
    assert 0.0 < result.damp <= 1e-2
    assert output_error(W, result.quantized.dequantize(), H) <= output_error(
        W, rtn(W, IntGrid(4, 16)).dequantize(), H
    )


def test_inverse_factor_is_the_inverse():
    _, X = layer()
    H = hessian(X)
    U, used = inverse_factor(H, 0.01)
    damped = H.double() + used * H.double().diagonal().mean() * torch.eye(32, dtype=torch.float64)
    assert torch.allclose((U.T @ U).double() @ damped, torch.eye(32, dtype=torch.float64), atol=1e-3)
    assert torch.equal(U, U.triu())


@pytest.mark.parametrize("where", ["weight", "hessian"])
def test_nan_is_refused(where):
    W, X = layer()
    H = hessian(X)
    (W if where == "weight" else H)[0, 0] = float("nan")
    with pytest.raises(NumericsError, match="NaN"):
        gptq(W, H, IntGrid(4, 8))


def test_inputs_are_untouched_and_the_same_call_gives_the_same_codes():
    W, X = layer()
    H = hessian(X)
    before = W.clone(), H.clone()
    first, second = gptq(W, H, IntGrid(4, 8)), gptq(W, H, IntGrid(4, 8))
    assert torch.equal(W, before[0]) and torch.equal(H, before[1])
    assert torch.equal(first.quantized.codes, second.quantized.codes)


def test_one_row_and_one_column():
    W, X = layer(rows=1, columns=8)
    assert gptq(W, hessian(X), IntGrid(4, 8)).quantized.codes.shape == (1, 8)
    assert gptq(W[:, :1], hessian(X[:, :1]), IntGrid(8, 0)).quantized.codes.shape == (1, 1)


def test_weights_with_one_input_rounded_together_are_those_rounded_alone():
    W, X = layer(rows=24, columns=64, tokens=900)
    H = hessian(X)
    weights = {str(number): part for number, part in enumerate(W.split([4, 12, 8]))}
    grid = IntGrid(4, 16)
    parameters = {name: grid.choose(part) for name, part in weights.items()}
    stack = StackedLayers(grid, weights, parameters, dict.fromkeys(weights))
    joined, _, rows, _ = stack.joined()
    together = dict(stack.split(gptq(joined, H, grid, parameters=rows)))
    for name, one in together.items():
        alone = gptq(weights[name], H, grid)
        assert torch.equal(one.quantized.parameters.scale, alone.quantized.parameters.scale)
        assert (one.quantized.codes != alone.quantized.codes).float().mean() < 0.01  # order of additions
    assert torch.allclose(
        torch.cat([one.quantized.dequantize() for one in together.values()]),
        gptq(W, H, grid).quantized.dequantize(),
    )


@pytest.mark.parametrize("rows", [0, 5])
def test_a_scale_that_several_rows_share(rows):
    W, X = layer()
    H = hessian(X)
    grid = IntGrid(4, 16, rows=rows)
    result = gptq(W, H, grid).quantized
    assert result.parameters.scale.shape == (-(-12 // rows) if rows else 1, 2)
    assert output_error(W, result.dequantize(), H) < output_error(W, rtn(W, grid).dequantize(), H)


def test_a_mask_keeps_zeros_and_the_rest_makes_up_for_them():
    W, X = layer(rows=32, columns=64, tokens=900)
    mask = torch.rand(W.shape, generator=torch.Generator().manual_seed(3)) > 0.5
    H = hessian(X)
    kept = gptq(W, H, IntGrid(4, 16), mask=mask).quantized
    assert (kept.codes[~mask] == 0).all()
    cut = gptq(W * mask, H, IntGrid(4, 16), mask=mask).quantized
    assert (cut.codes[~mask] == 0).all()
    # knowing which weights go, the others take over a part of their work
    assert output_error(W, kept.dequantize(), H) < 0.8 * output_error(W, cut.dequantize(), H)


def test_float64_is_tried_before_the_damping_is_raised():
    """Condition 1e9: float32's Cholesky fails, float64's does not."""
    g = torch.Generator().manual_seed(0)
    Q, _ = torch.linalg.qr(torch.randn(48, 48, generator=g, dtype=torch.float64))
    H = (Q * torch.logspace(0, -9, 48, dtype=torch.float64)) @ Q.T
    damped = H.float()
    _, failed = torch.linalg.cholesky_ex(damped)
    assert failed
    _, used = inverse_factor(H.float() + 3e-8 * torch.eye(48), 1e-7)
    assert used == 1e-7
