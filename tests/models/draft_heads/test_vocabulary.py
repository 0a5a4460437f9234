"""The reduced vocabulary of a head."""

import torch

from attar.models.draft_heads.vocabulary import chosen_of, frequent_tokens, offsets_of, spread


def test_the_most_frequent_tokens_stay_in_their_order():
    tokens = torch.tensor([7, 7, 3, 3, 3, 9, 1])
    assert frequent_tokens(tokens, 12, 3).tolist() == [1, 3, 7]  # of 1 and 9 the smaller one
    assert frequent_tokens(tokens, 12, 6).tolist() == [0, 1, 2, 3, 7, 9]


def test_offsets_are_those_of_the_published_layouts():
    chosen = torch.tensor([1, 3, 7])
    assert offsets_of(chosen).tolist() == [1, 2, 5]
    assert chosen_of(offsets_of(chosen)).tolist() == chosen.tolist()


def test_other_tokens_cannot_be_drafted():
    out = spread(torch.tensor([[0.5, 1.5]]), torch.tensor([1, 3]), 5)
    assert out.tolist() == [[-torch.inf, 0.5, -torch.inf, 1.5, -torch.inf]]
