"""Outliers and what they spare a block, against the formula written out."""

import pytest
import torch

from attar.pruning.criteria.owl import block_zeros, outlier_share


def test_outliers_are_counted_over_the_whole_block():
    g = torch.Generator().manual_seed(0)
    scores = [torch.rand(8, 16, generator=g) ** 8, 3 * torch.rand(4, 16, generator=g) ** 8]
    values = [value for part in scores for value in part.flatten().tolist()]
    mean = sum(values) / len(values)
    for multiple in (2.0, 5.0):
        by_hand = sum(value > multiple * mean for value in values) / len(values)
        assert outlier_share(scores, multiple) == pytest.approx(by_hand) and by_hand > 0


def test_blocks_of_one_size_get_the_papers_fractions():
    """As the authors compute densities: scaled to 2 lambda, shifted to the mean."""
    shares = torch.tensor([0.02, 0.05, 0.01, 0.035], dtype=torch.float64)
    density = (shares - shares.min()) / (shares.max() - shares.min()) * 2 * 0.08
    density = density - density.mean() + (1 - 0.7)
    zeros = block_zeros(shares, torch.full((4,), 100), 0.7)
    assert torch.allclose(zeros, 1 - density, atol=1e-9)
    assert zeros.argmin() == shares.argmax()


@pytest.mark.parametrize("asked", [0.01, 0.05, 0.5, 0.97, 0.999])
def test_the_mean_counts_weights_and_nothing_leaves_its_bounds(asked):
    shares = torch.tensor([0.001, 0.2, 0.03, 0.03, 0.15])
    sizes = torch.tensor([100, 400, 50, 1000, 7])
    zeros = block_zeros(shares, sizes, asked)
    assert float((zeros * sizes).sum() / sizes.sum()) == pytest.approx(asked, abs=1e-12)
    assert bool(((zeros >= 0) & (zeros <= 1)).all())
    assert float(zeros.max() - zeros.min()) <= 0.16 + 1e-9


def test_equal_blocks_are_pruned_equally():
    assert block_zeros(torch.full((3,), 0.02), torch.tensor([1, 2, 3]), 0.6).tolist() == [0.6] * 3
