"""Perplexity, KL, agreement and percentile against float64 formulas written another way."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attar.measure import metrics
from attar.measure.metrics import agreement, chunks, kl, likeliest, percentile, perplexity, token_losses


def logits(seed: int, tokens: int = 7, vocabulary: int = 33, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(tokens, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def brute_force(p_logits: torch.Tensor, q_logits: torch.Tensor) -> torch.Tensor:
    """The definition, term by term in Python floats."""
    out = []
    for p_row, q_row in zip(p_logits.double().tolist(), q_logits.double().tolist(), strict=True):
        most = max(p_row), max(q_row)
        p, q = ([math.exp(x - top) for x in row] for row, top in zip((p_row, q_row), most, strict=True))
        P, Q = sum(p), sum(q)
        out.append(sum(a / P * math.log(a / P / (b / Q)) for a, b in zip(p, q, strict=True) if a > 0))
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_distributions_are_exactly_zero_apart(dtype: torch.dtype) -> None:
    p = logits(0).to(dtype)
    assert torch.equal(kl(p, p.clone()), torch.zeros(7, dtype=torch.float64))


def test_known_value() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.25, 0.25, 0.5]]).log()
    assert kl(p, q).item() == pytest.approx(0.25 * math.log(2), rel=1e-6)  # .5 ln 2 + .25 ln 1/2


def test_direction_is_reference_first() -> None:
    p, q = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert kl(p, q).item() == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), rel=1e-6)
    assert kl(p, q).item() != pytest.approx(kl(q, p).item(), rel=1e-2)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.sampled_from([0.1, 1.0, 10.0, 60.0]))
def test_agrees_with_brute_force(seed: int, scale: float) -> None:
    p, q = logits(seed, scale=scale), logits(seed + 1, scale=scale)
    torch.testing.assert_close(kl(p, q), brute_force(p, q), rtol=3e-6, atol=1e-8)


def test_small_divergences_keep_their_digits() -> None:
    """What int8 rounding costs, below 1e-6 nats, over a wide vocabulary."""
    p = logits(3, tokens=50, vocabulary=5000)
    q = p + 1e-3 * logits(4, tokens=50, vocabulary=5000, scale=1.0)
    exact = brute_force(p, q)
    torch.testing.assert_close(kl(p, q), exact, rtol=0.0, atol=4e-8)
    assert kl(p, q).mean().item() == pytest.approx(exact.mean().item(), rel=1e-2)


def test_adding_a_constant_changes_nothing() -> None:
    p, q = logits(5), logits(6)
    torch.testing.assert_close(kl(p, q), kl(p + 100.0, q - 50.0), rtol=1e-4, atol=1e-6)


def test_padded_vocabulary_compares_over_the_common_columns() -> None:
    p, q = logits(7), logits(8)
    padded = torch.cat([q, torch.full((7, 5), 50.0)], dim=-1)
    assert torch.equal(kl(p, padded), kl(p, q))
    assert torch.equal(kl(padded, p), kl(q, p))
    assert torch.equal(agreement(p, padded), agreement(p, q))


def test_impossible_tokens() -> None:
    p = torch.tensor([[0.0, 0.0, -math.inf]])
    assert kl(p, p).item() == 0.0
    assert kl(p, torch.zeros(1, 3)).item() == pytest.approx(math.log(1.5), rel=1e-6)
    assert kl(torch.zeros(1, 3), p).item() == math.inf


def test_far_logits_do_not_overflow() -> None:
    p, q = torch.tensor([[0.0, -200.0]]), torch.tensor([[-200.0, 0.0]])
    assert kl(p, q).item() == pytest.approx(200.0, rel=1e-6)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = logits(9, tokens=20), logits(10, tokens=20)
    whole = kl(p, q), agreement(p, q)
    monkeypatch.setattr(metrics, "CHUNK_ELEMENTS", 70)  # two tokens of 33
    assert [part.stop - part.start for part in chunks(5, 33)] == [2, 2, 1]
    assert torch.equal(kl(p, q), whole[0])
    assert torch.equal(agreement(p, q), whole[1])


def test_inputs_are_not_modified() -> None:
    p, q = logits(11), logits(12)
    before = p.clone(), q.clone()
    kl(p, q), agreement(p, q)
    assert torch.equal(p, before[0])
    assert torch.equal(q, before[1])


def test_nan_is_not_hidden() -> None:
    p = logits(13)
    q = p.clone()
    q[2, 3] = math.nan
    assert kl(p, q).isnan().tolist() == [row == 2 for row in range(7)]


def test_no_tokens() -> None:
    assert kl(torch.zeros(0, 5), torch.zeros(0, 5)).shape == (0,)
    assert agreement(torch.zeros(0, 5), torch.zeros(0, 5)).shape == (0,)


def test_agreement() -> None:
    p = torch.tensor([[0.0, 1.0, 2.0], [5.0, 1.0, 2.0]])
    q = torch.tensor([[0.0, 9.0, 2.0], [5.0, 1.0, 2.0]])
    assert agreement(p, q).tolist() == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_likeliest_token_is_the_first_of_several(dtype: torch.dtype) -> None:
    rows = torch.tensor([[1.0, 3.0, 3.0], [2.0, -1.0, 2.0], [-5.0, math.nan, 7.0]], dtype=dtype)
    assert likeliest(rows).tolist() == rows.argmax(-1).tolist() == [1, 0, 1]
    close = torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64)
    assert likeliest(close).item() == 1
    assert likeliest(rows[:0]).shape == (0,)


def test_percentile_is_the_usual_one() -> None:
    values = torch.arange(101.0)
    assert percentile(values, 99) == pytest.approx(99.0)
    assert percentile(torch.tensor([0.0, 1.0]), 99) == pytest.approx(0.99)


def test_uniform_logits_cost_the_log_of_the_vocabulary() -> None:
    losses = token_losses(torch.zeros(4, 50), torch.tensor([0, 7, 49, 3]))
    assert losses.tolist() == pytest.approx([math.log(50)] * 4)
    assert perplexity(float(losses.mean())) == pytest.approx(50.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_agrees_with_float64_cross_entropy(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "CHUNK_ELEMENTS", 200)
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(17, 61, generator=generator) * 5).to(dtype)
    labels = torch.randint(61, (17,), generator=generator)
    expected = torch.nn.functional.cross_entropy(logits.double(), labels, reduction="none")
    losses = token_losses(logits, labels)
    assert losses.dtype == torch.float64
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)


def test_beyond_a_float_is_infinite() -> None:
    assert perplexity(1000.0) == math.inf
    assert math.isnan(perplexity(math.nan))


def test_losses_of_no_tokens() -> None:
    assert token_losses(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)).shape == (0,)
