"""The inputs of a training pass."""

import pytest
import torch

from attar.data.examples import Examples
from attar.data.packing import PADDING
from attar.distillation.adapters import add_adapters
from attar.distillation.stage import linears_of
from attar.models.fake_quant import CACHES
from attar.models.inputs import model_inputs
from tests import tiny_models


@pytest.mark.few(4)
@pytest.mark.parametrize("family", [*tiny_models.FAMILIES, *tiny_models.ENCODERS])
def test_no_cache_is_made_and_logits_stay(family):
    """Of rows with and without padding, and through adapters."""
    model = tiny_models.build(family)
    tokens = tiny_models.tokens(model, batch=2, length=12)
    padded = tokens.clone()
    padded[1, 8:] = PADDING
    for rows in (tokens, padded):
        batch = Examples.of_text(rows)
        asked = {"input_ids": batch.inputs, "attention_mask": batch.mask.long()}
        with torch.no_grad():
            outputs, plain = model(**model_inputs(model, batch)), model(**asked)
        assert all(getattr(outputs, name, None) is None for name in CACHES)
        mask = batch.mask
        torch.testing.assert_close(outputs.logits[mask], plain.logits[mask], rtol=1e-5, atol=1e-5)


def test_adapters_make_no_cache():
    pytest.importorskip("peft")
    model = tiny_models.build("llama3")
    adapted = add_adapters(model, linears_of(model), 2)
    asked = model_inputs(adapted, Examples.of_text(torch.arange(12)[None]))
    assert asked["use_cache"] is False
    assert all(getattr(adapted(**asked), name, None) is None for name in CACHES)
