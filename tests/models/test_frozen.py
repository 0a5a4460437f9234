"""Rounding the weights of a frozen model once gives the numbers that autocast gives in each pass."""

import pytest
import torch

from attar.models.frozen import round_frozen
from tests import tiny_models


@pytest.mark.parametrize("family", ["llama3", "smollm", "gpt2", "gemma2", "phi3", "bert"])
def test_the_same_numbers_in_less_memory(family):
    model = tiny_models.build(family).requires_grad_(False)
    rows = tiny_models.tokens(model)
    bytes_before = sum(p.nbytes for p in model.parameters())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = model(input_ids=rows, output_hidden_states=True)
        freed = round_frozen(model)
        rounded = model(input_ids=rows, output_hidden_states=True)
    assert torch.equal(wanted.logits, rounded.logits)
    assert all(torch.equal(*pair) for pair in zip(wanted.hidden_states, rounded.hidden_states, strict=True))
    assert sum(p.nbytes for p in model.parameters()) == bytes_before - freed < 0.8 * bytes_before


def test_what_is_trained_or_tied_stays():
    model = tiny_models.build("smollm")
    assert round_frozen(model) == 0
    model.requires_grad_(False)
    round_frozen(model)
    assert (
        model.lm_head.weight.dtype == torch.float32
        and model.lm_head.weight is model.model.embed_tokens.weight
    )
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
