"""Rotations are orthogonal, Hadamard where the width allows it, and the same for the same seed."""

import pytest
import torch

from attar.quantization.transforms.rotation import paley, random_rotation

# width -> order of the Paley factor (0: none is needed or known)
WIDTHS = {1: 0, 2: 0, 64: 0, 256: 0, 96: 12, 160: 20, 224: 28, 144: 36, 176: 44, 7: 0, 46: 0, 80: 20, 100: 0}


@pytest.mark.parametrize("keep_mean", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_orthogonal(width, keep_mean):
    R = random_rotation(width, 3, keep_mean=keep_mean).matrix().double()
    assert torch.allclose(R @ R.T, torch.eye(width, dtype=torch.float64), atol=1e-5)


@pytest.mark.parametrize(
    "width", [width for width, order in WIDTHS.items() if order or width in (2, 64, 256)]
)
def test_every_entry_has_one_size(width):
    """A Hadamard matrix: nothing spreads outliers more evenly."""
    rotation = random_rotation(width, 0)
    assert torch.allclose(rotation.matrix().abs(), torch.full((width, width), width**-0.5), atol=1e-6)
    assert not WIDTHS[width] or len(rotation.factors[-1]) == WIDTHS[width]


@pytest.mark.parametrize("order", [12, 20, 28, 36, 44, 52 * 2, 60])
def test_paley_matrices_are_hadamard(order):
    H = paley(order)
    assert torch.equal(H.abs(), torch.ones(order, order))
    assert torch.equal(H @ H.T, order * torch.eye(order))


@pytest.mark.parametrize("width", [64, 96, 7])
def test_keep_mean_keeps_the_mean_of_every_row(width):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, width, generator=g) + 2
    rotation = random_rotation(width, 1, keep_mean=True)
    assert torch.allclose(rotation.columns(x).mean(1), x.mean(1), atol=1e-5)
    norm = torch.nn.functional.layer_norm
    assert torch.allclose(norm(rotation.columns(x), (width,)), rotation.columns(norm(x, (width,))), atol=1e-4)


def test_sides_and_heads_by_the_matrix():
    g = torch.Generator().manual_seed(0)
    rotation = random_rotation(12, 5)
    R = rotation.matrix()
    W = torch.randn(7, 12, generator=g)
    assert torch.allclose(rotation.columns(W), W @ R, atol=1e-5)
    assert torch.allclose(rotation.rows(W.T), R.T @ W.T, atol=1e-5)
    whole = torch.block_diag(R, R, R)
    W = torch.randn(7, 36, generator=g)
    assert torch.allclose(rotation.head_columns(W), W @ whole, atol=1e-5)
    assert torch.allclose(rotation.head_rows(W.T), whole.T @ W.T, atol=1e-5)
    assert torch.allclose(rotation.head_rows(W[0]), whole.T @ W[0], atol=1e-5)


def test_seeds_and_chunks():
    assert torch.equal(random_rotation(96, 1).matrix(), random_rotation(96, 1).matrix())
    assert not torch.equal(random_rotation(96, 1).matrix(), random_rotation(96, 2).matrix())
    assert not torch.equal(random_rotation(7, 1).matrix().abs(), random_rotation(7, 2).matrix().abs())
    x = torch.randn(40, 96)
    rotation, kept = random_rotation(96, 1), x.clone()
    whole = rotation.columns(x)
    assert torch.equal(x, kept)
    assert torch.allclose(torch.cat([rotation.columns(part) for part in x.split(3)]), whole, atol=1e-6)


def test_an_outlier_is_spread_over_all_channels():
    x = torch.zeros(1, 96)
    x[0, 5] = 100.0
    assert random_rotation(96, 0).columns(x).abs().max() == pytest.approx(100 / 96**0.5, rel=1e-4)
