"""Which tokens are predicted, and that padding changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attar.data.packing import PADDING
from attar.measure.logits import next_token_logits, predicted, split


def test_predicted_leaves_out_the_first_token_and_padding() -> None:
    tokens = torch.tensor([[5, 6, 7, 8], [5, 6, PADDING, PADDING], [PADDING, PADDING, 5, 6]])
    assert predicted(tokens).tolist() == [[True, True, True], [True, False, False], [False, False, True]]


def test_split_keeps_the_logits_small() -> None:
    batches = [torch.arange(48).reshape(6, 8), torch.arange(8).reshape(1, 8)]
    pieces = split(batches, vocabulary=10, limit=2 * 8 * 10 * 4)
    assert [piece.shape[0] for piece in pieces] == [2, 2, 2, 1]
    assert torch.equal(torch.cat(pieces), torch.cat(batches))
    assert [piece.shape[0] for piece in split(batches, vocabulary=10, limit=1)] == [1] * 7


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_logit(tiny_model: Any, side: str) -> None:
    tokens = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
    pad = torch.full((2, 4), PADDING)
    padded = torch.cat([pad, tokens] if side == "left" else [tokens, pad], dim=1)
    plain = list(next_token_logits(tiny_model, tokens, 64))
    for (expected, labels), (logits, same) in zip(
        plain, next_token_logits(tiny_model, padded, 64), strict=True
    ):
        assert torch.equal(labels, same)
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


def test_logits_are_a_view_of_the_width(tiny_model: Any) -> None:
    tokens = torch.randint(64, (3, 6), generator=torch.Generator().manual_seed(1))
    before = tokens.clone()
    rows = list(next_token_logits(tiny_model, tokens, 50))
    assert [tuple(logits.shape) for logits, _ in rows] == [(5, 50)] * 3
    assert len({logits.untyped_storage().data_ptr() for logits, _ in rows}) == 1
    assert torch.equal(torch.stack([labels for _, labels in rows]), tokens[:, 1:])
    assert torch.equal(tokens, before)
