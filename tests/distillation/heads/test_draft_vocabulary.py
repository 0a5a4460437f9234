"""The reduced vocabulary of a head: which tokens, what they are called, and what is not learned."""

import pytest
import torch

from attar.data.examples import Examples
from attar.data.packing import PADDING
from attar.distillation.heads.draft_vocabulary import check_draft_vocabulary, choose_tokens, draft_labels
from attar.errors import SettingsError


def test_the_most_frequent_targets_are_chosen():
    tokens = torch.tensor([[9, 5, 5, 7], [9, 5, 7, 2], [9, 5, 5, 7]])  # 9 is never predicted
    assert choose_tokens(Examples.of_text(tokens), 12, 2).tolist() == [5, 7]
    assert choose_tokens(Examples.of_text(tokens), 12, 3).tolist() == [2, 5, 7]
    assert choose_tokens(Examples.of_text(tokens), 12, 0) is None
    assert choose_tokens(Examples.of_text(tokens), 12, 12) is None


def test_a_label_is_the_place_of_its_token_or_nothing():
    labels = torch.tensor([[5, 7, 3], [PADDING, 11, 5]])
    chosen = torch.tensor([5, 11])
    wanted = [[0, PADDING, PADDING], [PADDING, 1, 0]]
    assert draft_labels(labels, chosen, 12).tolist() == wanted
    assert draft_labels(labels, None, 12) is labels


def test_more_tokens_than_the_model_has_are_refused():
    with pytest.raises(SettingsError, match=r"draft_vocabulary is 13.*at most the model's 12"):
        check_draft_vocabulary(13, 12)
    check_draft_vocabulary(12, 12)
