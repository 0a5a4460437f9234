"""Conjugate gradients on a fixed support against one exact float64 solution for each row."""

from itertools import pairwise

import pytest
import torch

from attar.errors import NumericsError
from attar.pruning.solvers.least_squares import masked_least_squares
from attar.quantization.hessian import Hessian


def layer(rows=20, columns=96, seed=0, dead=(), tokens=400):
    """A weight, an H with correlated inputs, and a mask of half of the weights."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.eye(columns) + 0.5 * torch.randn(columns, columns, generator=g) / columns**0.5
    size = torch.logspace(-1, 1, columns)[torch.randperm(columns, generator=g)]
    X = (torch.randn(tokens, columns, generator=g) * size) @ mix
    X[:, list(dead)] = 0.0
    seen = Hessian(columns)
    seen.add(X)
    W = torch.randn(rows, columns, generator=g) * 0.1
    return W, seen.value(), torch.rand(W.shape, generator=g) < 0.5


def exact(W, H, mask, target, damp):
    """Each row's normal equations on its own support."""
    ridge = damp * H.diagonal().double().mean()
    A = H.double() + ridge * torch.eye(len(H), dtype=torch.float64)
    B = target.double() + ridge * W.double()
    solved = torch.zeros(W.shape, dtype=torch.float64)
    for row, support in enumerate(mask):
        solved[row, support] = torch.linalg.solve(A[support][:, support], B[row, support])
    return solved


@pytest.mark.parametrize("damp", [0.01, 0.1])
@pytest.mark.parametrize("moved", [False, True])
def test_converges_to_the_exact_solution(damp, moved):
    W, H, mask = layer()
    target = W @ H
    if moved:
        target = target + 0.1 * torch.randn(W.shape, generator=torch.Generator().manual_seed(3))
    wanted = exact(W, H, mask, target, damp)
    result = masked_least_squares(W, H, mask, iterations=80, damp=damp, target=target if moved else None)
    torch.testing.assert_close(result.double(), wanted, rtol=1e-3, atol=1e-4)
    assert not result[~mask].any()


def test_every_step_lowers_the_error_and_ten_are_nearly_enough():
    W, H, mask = layer(columns=160, tokens=1000)
    wanted = exact(W, H, mask, W @ H, 0.01)

    def error(result):
        E = result.double() - W
        return float(((E @ H.double()) * E).sum() + 0.01 * H.diagonal().double().mean() * E.square().sum())

    steps = [error(masked_least_squares(W, H, mask, iterations=count)) for count in range(11)]
    assert all(after <= before * (1 + 1e-6) for before, after in pairwise(steps))
    assert steps[0] == pytest.approx(error(W * mask), rel=1e-6)
    assert steps[-1] < error(wanted) + 0.02 * (steps[0] - error(wanted))


def test_rows_that_keep_nothing_one_or_everything():
    W, H, mask = layer(rows=3)
    mask[0], mask[1], mask[2] = False, False, True
    mask[1, 5] = True
    result = masked_least_squares(W, H, mask, iterations=60)
    assert not result[0].any() and (result[1] != 0).nonzero().tolist() == [[5]]
    torch.testing.assert_close(result[2], W[2], rtol=1e-5, atol=1e-6)
    alone = exact(W, H, mask, W @ H, 0.01)
    assert result[1, 5] == pytest.approx(float(alone[1, 5]), rel=1e-4)


@pytest.mark.parametrize("target", [False, True])
def test_a_column_that_was_never_seen_keeps_its_weights_under_the_mask(target):
    W, H, mask = layer(dead=[4, 40])
    result = masked_least_squares(W, H, mask, target=W @ H if target else None)
    torch.testing.assert_close(result[:, [4, 40]], (W * mask)[:, [4, 40]], rtol=1e-4, atol=1e-5)
    assert result.isfinite().all() and not (result[:, 5] == W[:, 5]).all()


def test_a_start_near_the_solution_needs_no_step():
    W, H, mask = layer()
    wanted = masked_least_squares(W, H, mask, iterations=80)
    again = masked_least_squares(W, H, mask, iterations=1, start=wanted)
    torch.testing.assert_close(again, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("broken", ["weight", "hessian"])
def test_nan_is_refused(broken):
    W, H, mask = layer()
    (W if broken == "weight" else H)[0, 0] = float("inf")
    with pytest.raises(NumericsError, match="infinity"):
        masked_least_squares(W, H, mask)


def test_inputs_are_untouched():
    W, H, mask = layer()
    before = W.clone(), H.clone(), mask.clone()
    masked_least_squares(W.bfloat16(), H, mask, start=W)
    assert torch.equal(W, before[0]) and torch.equal(H, before[1]) and torch.equal(mask, before[2])
