"""Examples: what is predicted from where, and that padding and prompts are not."""

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
