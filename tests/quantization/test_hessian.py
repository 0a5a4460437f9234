"""The Hessian accumulator and the error computed from it."""

import pytest
import torch

from attar.measure.footprint import reset_peak
from attar.memory import peak_rss_bytes
from attar.quantization import hessian
from attar.quantization.hessian import (
    CrossHessian,
    Hessian,
    energy,
    exact_energy,
    factorize_,
    inverse_factor_,
    output_error,
)
from attar.walks.positions import FIRST, PositionWeights


def test_is_twice_the_mean_outer_product_over_batches():
    X = torch.randn(3, 10, 6, generator=torch.Generator().manual_seed(0))
    h = Hessian(6)
    for batch in X:
        h.add(batch)
    flat = X.reshape(-1, 6).double()
    assert torch.allclose(h.value().double(), 2 * flat.T @ flat / 30, atol=1e-5)


def test_output_error_is_the_relative_error_of_the_outputs():
    g = torch.Generator().manual_seed(1)
    X, W = torch.randn(50, 6, generator=g), torch.randn(4, 6, generator=g)
    V = W + 0.1 * torch.randn(4, 6, generator=g)
    h = Hessian(6)
    h.add(X)
    wanted = ((X @ (W - V).T) ** 2).sum() / ((X @ W.T) ** 2).sum()
    assert output_error(W, V, h.value()) == pytest.approx(float(wanted), rel=1e-4)
    assert output_error(W, W, h.value()) == 0.0


def test_the_final_value_takes_no_further_memory():
    x = torch.randn(40, 300, generator=torch.Generator().manual_seed(0))
    total, cross = Hessian(300), CrossHessian(300)
    for statistics in (total, cross):
        statistics.add(x[:20])
        statistics.add(x[20:])
    expected, memory = total.value(), total.sum.data_ptr()
    final = total.final()
    assert torch.equal(final, expected) and final.data_ptr() == memory
    assert torch.equal(total.value(), expected) and total.final() is final and total.tokens == 40
    assert torch.equal(cross.final(), expected) and torch.equal(cross.cross(), expected)
    with pytest.raises(AssertionError, match="after final"):
        total.add(x)


def correlated(K, seed=0):
    """H (K, K) of inputs of different sizes, one of them always zero."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2 * K, K, generator=g) * torch.rand(K, generator=g)
    x[:, K // 3] = 0.0
    seen = Hessian(K)
    seen.add(x)
    return seen.final()


def plain_factor(H, damp, order):
    """U as the formula says, each step with memory of its own."""
    damped = H[order.flip(0)][:, order.flip(0)]
    damped.diagonal().add_(damp * H.diagonal().mean())
    R = torch.linalg.cholesky(damped).flip(0, 1)
    return torch.linalg.solve_triangular(R, torch.eye(len(H)).T, upper=True).contiguous()


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("K", [7, 64, 257, 601])
def test_the_factor_in_the_hessians_memory_is_the_plain_one_to_the_last_bit(K, act_order):
    H = correlated(K)
    before, damped = H.clone(), H.clone()
    damped[K // 3, K // 3] = damped.diagonal()[damped.diagonal() > 0].median()
    factor = factorize_(H, 0.01, act_order)
    assert torch.equal(factor.U, plain_factor(damped, 0.01, factor.order))
    assert torch.equal(H, before) and factor.U.is_contiguous()
    assert torch.equal(factor.diagonal, damped.diagonal())


def test_a_factor_that_is_tried_again_finds_the_hessian_as_it_was():
    H = torch.ones(300, 300)  # rank 1: float64 and a larger damping
    U, used = inverse_factor_(H, 0.0)
    assert used == 1e-4 and torch.equal(H, torch.ones(300, 300))
    assert torch.isfinite(U).all() and torch.equal(U, U.triu())


@pytest.mark.skipif(not reset_peak(), reason="the peak cannot be reset")
def test_a_factor_takes_one_matrix_beside_the_hessian():
    H = correlated(64)
    factorize_(H)  # what torch allocates once
    K = 3072
    H = torch.eye(K) + 1 / K
    reset_peak()
    before = peak_rss_bytes()
    factor = factorize_(H)
    taken = (peak_rss_bytes() - before) / H.nbytes
    assert taken < 1.85, taken  # one, and pieces of 256 rows; with a copy for each step: 2.0
    assert factor.U.nbytes == H.nbytes


def test_columns_in_rounding_order_are_the_weights():
    H, g = correlated(600), torch.Generator().manual_seed(1)
    factor = factorize_(H)
    W = torch.randn(5, 600, generator=g).bfloat16()
    expected = W.float()
    assert torch.equal(factor.columns(W), expected[:, factor.order].T)


@pytest.mark.parametrize("function", [energy, exact_energy])
def test_the_energy_in_pieces_is_that_of_the_whole(monkeypatch, function):
    g = torch.Generator().manual_seed(2)
    H, W = correlated(70), torch.randn(11, 70, generator=g)
    less = W.bfloat16()
    E = W.double() - less.double()
    whole = float((E @ H.double() * E).sum())
    monkeypatch.setattr(hessian, "ROWS", 3)
    monkeypatch.setattr(hessian, "CHUNK", 70)
    monkeypatch.setattr(hessian, "COLUMNS", 16)
    tolerance = 1e-5 if function is exact_energy else 2e-2
    assert function(W, H, less) == pytest.approx(whole, rel=tolerance)
    assert function((W - less.float()), H) == pytest.approx(whole, rel=tolerance)


@pytest.mark.parametrize("kind", [Hessian, CrossHessian])
def test_a_token_of_importance_three_counts_as_three_tokens(kind):
    x, original = (torch.randn(2, 40, 6, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    importance = PositionWeights(3.0).importance((), 1, 40, torch.device("cpu"))
    weighed, repeated = kind(6), kind(6)
    more = torch.arange(40).repeat_interleave(torch.where(torch.arange(40) < FIRST, 3, 1))
    for start in (0, 1):
        pair = [part[start : start + 1] for part in (x, original)][: 2 if kind is CrossHessian else 1]
        weighed.add(*pair, importance=importance)
        repeated.add(*(part[:, more] for part in pair))
    torch.testing.assert_close(weighed.value(), repeated.value())
    if kind is CrossHessian:
        torch.testing.assert_close(weighed.cross(), repeated.cross())
    assert weighed.tokens == 80 and weighed.weight == repeated.weight
