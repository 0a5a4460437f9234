"""Perplexity against torch's cross-entropy in float64 and against known values."""

from __future__ import annotations

import math

import pytest
import torch

from attar.measure import metrics as divergence
from attar.measure.metrics import perplexity, token_losses


def test_uniform_logits_cost_the_log_of_the_vocabulary() -> None:
    losses = token_losses(torch.zeros(4, 50), torch.tensor([0, 7, 49, 3]))
    assert losses.tolist() == pytest.approx([math.log(50)] * 4)
    assert perplexity(float(losses.mean())) == pytest.approx(50.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_agrees_with_float64_cross_entropy(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "CHUNK_ELEMENTS", 200)
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


def test_no_tokens() -> None:
    assert token_losses(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)).shape == (0,)
