"""Amounts of zeros: what a text means, and which weights stay."""

import itertools

import pytest
import torch

from attar.errors import SettingsError
from attar.sparsity import Sparsity, parse_sparsity


@pytest.mark.parametrize(
    ("text", "sparsity"),
    [
        ("0.5", Sparsity(0.5)),
        (0.5, Sparsity(0.5)),
        ("70%", Sparsity(0.7)),
        ("2:4", Sparsity(0.5, 2, 4)),
        ("1:4", Sparsity(0.75, 1, 4)),
    ],
)
def test_what_a_text_means(text, sparsity):
    assert parse_sparsity(text) == sparsity


@pytest.mark.parametrize(
    "text", [0, 1.5, "0", "1", "1.5", "-0.1", "4:4", "0:4", "5:4", "half", "", "nan", "2:4:8", "2:999"]
)
def test_other_texts_are_refused_by_the_settings_name(text):
    with pytest.raises(SettingsError, match=r"amount.*N:M such as 2:4"):
        parse_sparsity(text, "amount")


@pytest.mark.parametrize("pattern", ["2:4", "4:8", "1:4", "3:5"])
def test_n_of_m_stay_even_where_scores_are_equal(pattern):
    sparsity = parse_sparsity(pattern)
    scores = torch.randint(0, 3, (7, 4 * sparsity.of)).float()
    groups = sparsity.mask(scores).unflatten(1, (-1, sparsity.of))
    assert (groups.sum(-1) == sparsity.kept).all()
    lowest_kept = torch.where(groups, scores.reshape(groups.shape), 9.0).amin(-1)
    largest_gone = torch.where(groups, -1.0, scores.reshape(groups.shape)).amax(-1)
    assert (lowest_kept >= largest_gone).all()


@pytest.mark.parametrize("by_row", [False, True])
def test_a_fraction_of_the_matrix_or_of_each_row(by_row):
    scores = torch.arange(40.0).reshape(4, 10)
    mask = Sparsity(0.5).mask(scores, by_row=by_row)
    assert mask.sum(1).tolist() == ([5, 5, 5, 5] if by_row else [0, 0, 10, 10])


def test_what_fits():
    assert parse_sparsity("2:4").fits(64) and not parse_sparsity("2:4").fits(66)
    assert parse_sparsity("0.5").fits(66)


@pytest.mark.parametrize("values", [3, 1000, 10**9])
@pytest.mark.parametrize("text", ["0.5", "0.01", "0.99", "0.999999", "2:4", "3:16", "5:32"])
def test_the_largest_stay_as_a_stable_sort_has_them(text, values):
    sparsity = parse_sparsity(text)
    scores = torch.randint(0, values, (9, 96), generator=torch.Generator().manual_seed(1)).float()
    for by_row in (False, True):
        rows = scores if by_row else scores.reshape(1, -1)
        if sparsity.of:
            rows = scores.unflatten(1, (-1, sparsity.of))
        kept = sparsity.kept or rows.shape[-1] - round(rows.shape[-1] * sparsity.zeros)
        first = rows.argsort(dim=-1, descending=True, stable=True)[..., :kept]
        wanted = torch.zeros(rows.shape, dtype=torch.bool).scatter_(-1, first, True).reshape(scores.shape)
        assert torch.equal(sparsity.mask(scores, by_row=by_row), wanted)


def test_a_matrix_that_cannot_have_the_pattern_is_named():
    parse_sparsity("2:4").check(64, "q_proj")
    with pytest.raises(SettingsError, match=r"sparsity is '2:4'.*q_proj has 66"):
        parse_sparsity("2:4").check(66, "q_proj")


@pytest.mark.parametrize("text", ["1:2", "1:4", "2:4", "2:8", "3:4", "4:8", "3:8", "2:6", "0.5"])
def test_two_of_four_is_what_every_mask_of_the_pattern_has(text):
    """Against the worst choice of kept weights, four by four."""
    sparsity = parse_sparsity(text)
    worst = 4
    if sparsity.of:
        row = torch.zeros(3, sparsity.of)
        counts = []
        for kept in itertools.combinations(range(sparsity.of), sparsity.kept):
            row[:] = 0.0
            row[1, list(kept)] = 1.0
            row[0, -sparsity.kept :] = row[2, : sparsity.kept] = 1.0
            whole = row.flatten()[: len(row.flatten()) // 4 * 4]
            counts.append(int(whole.unflatten(0, (-1, 4)).sum(1).max()))
        worst = max(counts)
    assert sparsity.two_of_four == (worst <= 2)


def test_rows_whose_share_is_no_whole_number_lose_one_more_in_turn():
    torch = pytest.importorskip("torch")
    mask = parse_sparsity("0.5").mask(torch.arange(12.0).reshape(4, 3), by_row=True)
    assert (~mask).sum(1).tolist() == [1, 2, 1, 2]
