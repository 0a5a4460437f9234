"""Standard errors of means and of ratios, against the bootstrap, textbook formulas and repeated draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attar.measure.uncertainty import BLOCK, ROWS, mean_stderr, ratio_stderr, row_means


def hits_of(generator, tokens, sequences=8, accuracy=0.5, changed=0.1, reach=0, kept=1.0):
    """Paired hits (n,) of each sequence, a share drawn anew; ``reach``: of so many neighbours alike."""
    repeat = max(reach, 1)
    length = tokens // sequences

    def draw(share):
        return np.repeat(generator.random((sequences, -(-length // repeat))) < share, repeat, axis=1)[
            :, :length
        ]

    theirs, anew = draw(accuracy), draw(changed)
    ours = np.where(anew, draw(accuracy * kept), theirs)
    return [torch.from_numpy(row) for row in ours], [torch.from_numpy(row) for row in theirs]


@pytest.mark.parametrize(
    ("tokens", "changed", "reach", "kept"),
    [(4096, 0.1, 0, 1.0), (4096, 0.4, 5, 1.0), (1024, 0.2, 0, 0.9), (4096, 1.0, 3, 0.3)],
)
def test_a_ratio_has_the_error_of_its_block_bootstrap(tokens, changed, reach, kept):
    generator = np.random.default_rng(1)
    ours, theirs = hits_of(generator, tokens, changed=changed, reach=reach, kept=kept)
    blocks = np.array(
        [
            (a.sum(), b.sum())
            for x, y in zip(ours, theirs, strict=True)
            for a, b in zip(x.split(BLOCK), y.split(BLOCK), strict=True)
        ]
    )
    drawn = blocks[generator.integers(0, len(blocks), (4000, len(blocks)))].sum(axis=1)
    bootstrap = (drawn[:, 0] / drawn[:, 1]).std()
    assert ratio_stderr(ours, theirs) == pytest.approx(bootstrap, rel=0.1)


@pytest.mark.few(1)
@pytest.mark.parametrize("reach", [0, 6])
@pytest.mark.parametrize("tokens", [512, 4096])
def test_its_interval_holds_the_truth_in_95_of_100_texts(tokens, reach):
    generator, held = np.random.default_rng(2), 0
    for _ in range(200):
        ours, theirs = hits_of(generator, tokens, changed=0.3, reach=reach)  # the truth is 1
        ratio = float(torch.cat(ours).sum() / torch.cat(theirs).sum())
        held += abs(ratio - 1) <= 1.96 * ratio_stderr(ours, theirs)
    assert 0.89 <= held / 200 <= 0.99  # of 200 texts 190 +- 3, the deviation


def test_models_that_agree_everywhere_have_an_error_of_one_token():
    hits = [torch.tensor([True, False] * 128)]
    assert ratio_stderr(hits, hits) == pytest.approx(1 / 128)


def test_pairs_tell_more_than_two_accuracies():
    ours, theirs = hits_of(np.random.default_rng(3), 4096, changed=0.02)
    shuffled = [row[torch.randperm(len(row), generator=torch.Generator().manual_seed(0))] for row in ours]
    assert ratio_stderr(ours, theirs) < 0.4 * ratio_stderr(shuffled, theirs)


def test_a_mean_of_independent_values_has_the_textbook_error():
    values = torch.randn(64, 128, generator=torch.Generator().manual_seed(4)).exp()
    textbook = float(values.std() / values.numel() ** 0.5)
    assert mean_stderr(list(values)) == pytest.approx(textbook, rel=0.1)


def test_neighbours_alike_enlarge_the_error_of_a_mean():
    values = torch.randn(64, 32, generator=torch.Generator().manual_seed(5)).repeat_interleave(4, dim=1)
    naive = float(values.std() / values.numel() ** 0.5)
    assert mean_stderr(list(values)) == pytest.approx(2 * naive, rel=0.15)


def test_too_little_to_tell():
    one, none = [torch.tensor([True])], [torch.tensor([False, False])]
    assert mean_stderr(one) is None and ratio_stderr(one, one) is None and ratio_stderr(none, none) is None
    assert mean_stderr([torch.tensor([1.0]), torch.tensor([3.0])]) == pytest.approx(1.0)


def test_many_rows_are_kept_as_stretches_of_neighbours():
    rows = [torch.full((3,), float(number)) for number in range(2 * ROWS)]
    assert row_means(rows) == tuple(2 * number + 0.5 for number in range(ROWS))
    assert row_means(rows[:3]) == (0.0, 1.0, 2.0)
