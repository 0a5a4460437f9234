"""From scores to the units that stay."""

import pytest
import torch

from attar.models.anatomy.unit_weights import units_of
from attar.pruning.selection import keep_most_important, keep_over_rows, standardized, without_removed


def test_keep_is_ascending_and_breaks_ties_downwards():
    assert keep_most_important(torch.tensor([[0.1, 3.0, 2.0], [1.0, 1.0, 1.0]]), 2) == [[1, 2], [0, 1]]


def test_rows_share_a_total_by_their_scores():
    scores = torch.tensor([[9.0, 8.0, 7.0, 6.0], [5.0, 1.0, 2.0, 0.0]], dtype=torch.float64)
    assert keep_over_rows(scores, 2) == [[0, 1, 2, 3], [0]]  # one of a row always stays
    assert keep_over_rows(scores, 3, multiple=2) == [[0, 1, 2, 3], [0, 2]]


def test_removed_units_stay_removed():
    scores = torch.tensor([[9.0, 8.0, 7.0, 6.0], [5.0, 1.0, 2.0, 0.0]], dtype=torch.float64)
    left = without_removed(scores, [[1, 3], [0, 3]])
    assert keep_most_important(left, 1) == [[1], [0]] and keep_over_rows(left, 1) == [[1, 3], [0]]


def test_standardized_rows_have_mean_0_and_deviation_1_without_the_removed_units():
    scores = without_removed(torch.tensor([[1.0, 3.0, 100.0], [2.0, 4.0, 9.0]]), [[0, 1], [0, 1, 2]])
    got = standardized(scores)
    assert got[0].tolist() == [-1.0, 1.0, -float("inf")]
    assert got[1].mean().item() == pytest.approx(0, abs=1e-6)
    assert got[1].square().mean().item() == pytest.approx(1, rel=1e-6)


def test_units_cover_every_column_once():
    assert units_of([range(2), range(2, 5)], 5).tolist() == [0, 0, 1, 1, 1]
    with pytest.raises(AssertionError):
        units_of([range(2)], 5)
