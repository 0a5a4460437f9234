"""The Hessian accumulator and the error computed from it."""

import pytest
import torch

from attar.quantization.hessian import CrossHessian, Hessian, output_error


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
