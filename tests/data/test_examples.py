"""Examples: what is predicted from where, and that padding and prompts are not."""

import pytest
import torch

from attar.data.examples import Examples, predictions
from attar.data.packing import PADDING, Batches

ROWS = torch.tensor([[5, 6, 7, 8], [9, 10, PADDING, PADDING]])


def test_each_token_of_text_is_predicted_from_the_one_before():
    examples = Examples.of_text(ROWS)
    assert examples.targets.tolist() == [[6, 7, 8, PADDING], [10, PADDING, PADDING, PADDING]]
    assert examples.labels.tolist() == [6, 7, 8, 10]
    assert examples.count() == predictions(examples) == predictions(ROWS) == 4
    assert examples.inputs.tolist() == [[5, 6, 7, 8], [9, 10, 0, 0]]
    assert examples.mask.sum() == 6


def test_parts_keep_tokens_and_targets_together():
    examples = Examples(torch.arange(10)[:, None].expand(-1, 3), torch.arange(10))
    parts = list(examples.split(4))
    assert [len(part) for part in parts] == [4, 4, 2]
    assert all(torch.equal(part.tokens[:, 0], part.targets) for part in parts)
    batches = Batches(examples, 3, seed=1)
    shown = torch.cat([batches[number].targets for number in range(3)])
    assert len(shown.unique()) == 9
    assert all(torch.equal(batches[number].tokens[:, 0], batches[number].targets) for number in range(4))


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
def test_what_a_step_asks_of_rows(moved, per_row):
    """Columns with tokens, padding, predictions: the same when they were found before rows were moved."""
    tokens = torch.tensor([[5, 6, 7, PADDING, PADDING], [8, 9, PADDING, PADDING, PADDING]])
    batch = Examples(tokens, torch.tensor([2, PADDING])) if per_row else Examples.of_text(tokens)
    batch = batch.to("cpu") if moved else batch
    trimmed = batch.trimmed()
    assert trimmed.tokens.tolist() == [[5, 6, 7], [8, 9, PADDING]] and trimmed.trimmed() is trimmed
    assert trimmed.targets.shape == ((2,) if per_row else (2, 3))
    assert (batch.seed, trimmed.seed, batch.full, trimmed[:1].full) == (35, 35, False, True)
    for rows in (batch, trimmed):
        values = torch.rand(*rows.targets.shape, 4)
        assert torch.equal(rows.at_predictions(values), values[rows.predicted])
        assert rows.labels.tolist() == ([2] if per_row else [6, 7, 9]) and rows.count() == len(rows.labels)
