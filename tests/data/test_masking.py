"""Dynamic masking: the law of what is hidden, and that a batch's number alone decides it."""

import pytest
import torch

from attar.data.masking import MaskedBatches, MaskRule, hide, masked_rows
from attar.data.packing import PADDING, Batches, numbered_generator
from attar.errors import DataError
from tests import tiny_models

RULE = MaskRule(mask=2, special=(0, 1, 2), vocabulary=320)


def test_fifteen_per_cent_are_hidden_by_the_rule_of_bert():
    rows = torch.randint(3, 320, (400, 256), generator=numbered_generator(0, 1))
    rows[:, 0], rows[:, 100], rows[:50, 200:] = 0, 1, PADDING
    hidden = hide(rows, RULE, numbered_generator(7, 3))
    predicted = hidden.predicted
    free = (rows != PADDING) & (rows > 2)
    assert not bool((predicted & ~free).any())
    assert bool((hidden.targets[predicted] == rows[predicted]).all())
    assert torch.equal(hidden.tokens[~predicted], rows[~predicted])
    n = int(predicted.sum())
    assert n / int(free.sum()) == pytest.approx(0.15, abs=0.005)
    tokens, originals = hidden.tokens[predicted], rows[predicted]
    masked, kept = tokens == 2, tokens == originals
    other = tokens[~masked & ~kept]
    assert int(masked.sum()) / n == pytest.approx(0.8, abs=0.015)
    assert int(kept.sum()) / n == pytest.approx(0.1 + 0.1 / 317, abs=0.01)
    assert len(other) / n == pytest.approx(0.1, abs=0.01)
    assert int(other.min()) > 2 and len(other.unique()) > 250


def test_a_batch_is_a_function_of_its_number():
    rows = torch.randint(3, 320, (20, 64), generator=numbered_generator(0, 1))
    batches = MaskedBatches(Batches(rows, 4, 0), RULE)
    first, second = batches.batch(3, None), MaskedBatches(Batches(rows, 4, 0), RULE).batch(3, None)
    assert torch.equal(first.tokens, second.tokens) and torch.equal(first.targets, second.targets)
    same = MaskedBatches(Batches(rows[:1].expand(4, -1), 4, 0), RULE)
    epochs = [same.batch(number, None).targets for number in range(2)]  # one text, hidden elsewhere
    assert not torch.equal(*epochs) and not torch.equal(epochs[0][0], epochs[0][1])


@pytest.mark.parametrize("packing", ["stream", "separate"])
def test_rows_stand_between_the_tokenizers_own_tokens(tmp_path, packing):
    (tmp_path / "x.txt").write_text("def f(x):\n    return x\n" * 200)
    tokenizer = tiny_models.encoder_tokenizer()
    rows = masked_rows(
        tokenizer, str(tmp_path / "x.txt"), "train", length=32, rows=None, seed=0, packing=packing
    ).rows
    assert rows.shape[1] == 32 and len(rows) > 1
    assert bool((rows[:, 0] == tokenizer.cls_token_id).all())
    for row in rows:
        real = row[row != PADDING]
        assert real[-1] == tokenizer.sep_token_id and real[-2] != tokenizer.sep_token_id
        assert torch.equal(row[: len(real)], real)


def test_a_tokenizer_without_a_mask_token_is_refused():
    tokenizer = tiny_models.tokenizer()
    assert MaskRule.of(tokenizer).mask == 2
    tokenizer.mask_token = None
    with pytest.raises(DataError, match="no mask token"):
        MaskRule.of(tokenizer)
