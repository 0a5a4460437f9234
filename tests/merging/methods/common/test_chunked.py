"""Norms and inner products of large tensors, where torch's own lose digits."""

import pytest
import torch

from attar.merging.methods import METHODS
from attar.merging.methods.common.chunked import FEW, inner_product, norm

LARGE = 3 * FEW + 7


@pytest.fixture(scope="module")
def pair():
    generator = torch.Generator().manual_seed(0)
    x = 0.02 * torch.randn(LARGE, generator=generator)
    return x, x + 0.004 * torch.randn(LARGE, generator=generator)


def test_the_norm_of_a_large_tensor_is_exact(pair):
    x, _ = pair
    exact = float(x.double().norm())
    assert abs(float(norm(x)) / exact - 1) < 1e-7
    assert (
        abs(float(norm(x.bfloat16(), dtype=torch.float32)) / float(x.bfloat16().double().norm()) - 1) < 1e-7
    )


def test_along_a_dimension(pair):
    x, y = pair
    rows = torch.stack([x, y])
    torch.testing.assert_close(
        norm(rows, -1).double(), rows.double().norm(dim=-1, keepdim=True), rtol=1e-7, atol=0
    )
    torch.testing.assert_close(
        norm(rows.T, 0).double(), rows.T.double().norm(dim=0, keepdim=True), rtol=1e-7, atol=0
    )
    small = rows[:, :12].reshape(2, 3, 4)
    assert torch.equal(norm(small, 1), small.norm(dim=1, keepdim=True))


def test_small_ones_are_torch_s(pair):
    x = pair[0][:1000]
    assert torch.equal(norm(x), x.norm())


def test_inner_product(pair):
    x, y = pair
    assert inner_product(x, y) == pytest.approx(float(x.double() @ y.double()), rel=1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize("compat", ["mergekit", "paper"])
def test_slerp_of_large_tensors_is_that_of_float64(pair, compat):
    """The cosine is 0.98: the branch with sines, in which a wrong norm shows."""
    x, y = pair
    a, b = x.double(), y.double()
    th = torch.arccos((a / a.norm()) @ (b / b.norm()))
    want = (torch.sin(0.7 * th) * a + torch.sin(0.3 * th) * b) / torch.sin(th)
    got = METHODS["slerp"].merge([y], x, shared={"t": 0.3}, per_model={}, compat=compat)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-9)
