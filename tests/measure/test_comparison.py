"""Comparisons with a reference, against plain softmaxes in float64 and slow loops."""

from __future__ import annotations

import pytest
import torch

from attar.measure.comparison import CONFIDENCES, compare, compare_answers, compare_tokens
from attar.measure.metrics import confidence
from attar.measure.uncertainty import row_stderr

ROWS = (7, 40, 0, 23)


@pytest.fixture(scope="module")
def rows():
    """Logits of reference and model, and labels, of four rows."""
    generator = torch.Generator().manual_seed(0)
    result = []
    for count in ROWS:
        reference = (
            torch.randn(count, 11, generator=generator) * 4 * torch.rand(count, 1, generator=generator)
        )
        logits = reference + torch.randn(count, 11, generator=generator)
        result.append((reference, logits, torch.randint(11, (count,), generator=generator)))
    return result


def test_confidence_is_the_largest_probability(rows):
    for reference, _, _ in rows:
        assert torch.allclose(confidence(reference), reference.double().softmax(-1).amax(-1), atol=1e-6)


def test_flips_have_a_direction(rows):
    compared = compare([compare_tokens(*row) for row in rows])
    lost = won = 0
    for reference, logits, labels in rows:
        for p, q, label in zip(reference, logits, labels, strict=True):
            before, now = int(p.argmax()) == int(label), int(q.argmax()) == int(label)
            lost, won = lost + (before and not now), won + (now and not before)
    assert lost and won and lost != won
    assert (compared.tokens_lost, compared.tokens_won) == (lost / sum(ROWS), won / sum(ROWS))
    assert compared.kl_rows is not None and len(compared.kl_rows) == 3, "a row without predictions has none"


def test_buckets_hold_every_token_once(rows):
    compared = compare([compare_tokens(*row) for row in rows])
    p, q = (torch.cat([row[side] for row in rows]).double().log_softmax(-1) for side in (0, 1))
    distances, sure = (p.exp() * (p - q)).sum(-1), p.exp().amax(-1)
    assert compared.kl_by_confidence is not None
    assert sum(bucket.tokens for bucket in compared.kl_by_confidence) == sum(ROWS)
    assert [bucket.above for bucket in compared.kl_by_confidence] == list(CONFIDENCES[:-1])
    for bucket in compared.kl_by_confidence:
        inside = (sure > bucket.above) & (sure <= bucket.up_to)
        assert bucket.tokens == int(inside.sum()) > 0
        assert bucket.kl_mean == pytest.approx(float(distances[inside].mean()), rel=1e-5)
        same = (p.argmax(-1) == q.argmax(-1))[inside]
        assert bucket.top1_agreement == pytest.approx(float(same.double().mean()))


def test_an_empty_bucket_has_no_figures():
    sure = torch.tensor([[50.0, 0.0]])
    buckets = compare([compare_tokens(sure, sure, torch.tensor([0]))]).kl_by_confidence
    assert [bucket.tokens for bucket in buckets] == [0, 0, 0, 0, 1]
    assert (buckets[0].kl_mean, buckets[0].top1_agreement) == (None, None)


def test_answers_agree_up_to_the_first_token_that_differs():
    reference = [[1, 2, 3, 4], [5, 6], [7], [8, 9, 1, 1]]
    compared = compare_answers([[1, 2, 9, 4], [5, 6], [7, 7, 7, 7], [3]], reference)
    assert (compared.answers_same, compared.answers_agreement) == (0.25, (0.5 + 1 + 0.25 + 0) / 4)
    assert compared.answers_agreement_stderr == pytest.approx(
        torch.tensor([0.5, 1, 0.25, 0]).std().item() / 2
    )
    assert (compared.answers_length, compared.reference_answers_length) == (11 / 4, 11 / 4)
    assert compare_answers([], []).answers_same is None


def test_the_error_over_rows_is_that_of_its_bootstrap():
    """Rows of unequal length whose tokens share a level; blocks of tokens would say a fifth."""
    generator = torch.Generator().manual_seed(1)
    rows = [
        torch.rand(1, generator=generator) + 0.1 * torch.randn(length, generator=generator)
        for length in torch.randint(50, 200, (60,), generator=generator).tolist()
    ]
    sums, counts = torch.stack([row.sum() for row in rows]), torch.tensor([float(len(row)) for row in rows])
    drawn = torch.randint(60, (4000, 60), generator=generator)
    bootstrap = float((sums[drawn].sum(1) / counts[drawn].sum(1)).std())
    assert row_stderr(rows) == pytest.approx(bootstrap, rel=0.1)
    assert row_stderr(rows[:1]) is None
    assert row_stderr([torch.tensor([1.0]), torch.zeros(0), torch.tensor([3.0])]) == pytest.approx(1.0)
