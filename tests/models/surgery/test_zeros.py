"""Which zeros are kept: by the card, its lineage, the amount, and whether the model was quantized."""

from types import SimpleNamespace

import pytest
import torch

from attar.checkpoint.card import Card, Parent
from attar.models.surgery.zeros import resolve_zeros, stated_zeros, zero_mask


def checkpoint(card=None, config=None, block=False):
    return SimpleNamespace(
        card=card, config=config or {}, tensors={"w": SimpleNamespace(block=block)}, source=None
    )


def parent(stage, role="weights", parents=(), **settings):
    return Parent(role=role, name=stage, stage=stage, settings=settings, parents=parents)


CASES = {
    "a model without a card": (checkpoint(), "auto"),
    "its own card": (checkpoint(Card(name="m", stage="prune", settings={"sparsity": "2:4"})), "true"),
    "units were cut": (checkpoint(Card(name="m", stage="prune", settings={"ratio": 0.5})), "auto"),
    "an ancestor": (
        checkpoint(
            Card(
                name="m",
                stage="quantize",
                parents=(parent("recover", parents=(parent("prune", sparsity="0.5"),)),),
            )
        ),
        "true",
    ),
    "only the teacher": (
        checkpoint(Card(name="m", stage="distill", parents=(parent("prune", "signal", sparsity="0.5"),))),
        "auto",
    ),
    "rounded once": (checkpoint(Card(name="m", stage="export", parents=(parent("quantize"),))), "false"),
    "rounded and pruned in one pass": (
        checkpoint(Card(name="m", stage="quantize", settings={"sparsity": "2:4"})),
        "true",
    ),
    "packed": (checkpoint(config={"quantization_config": {"quant_method": "gptq"}}), "false"),
    "GGUF blocks": (checkpoint(block=True), "false"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_auto_means(case):
    model, wanted = CASES[case]
    assert resolve_zeros(model, "auto") == wanted
    assert [resolve_zeros(model, keep) for keep in ("true", "false")] == ["true", "false"]


@pytest.mark.parametrize(
    ("zeros", "keep", "masked"),
    [(0, "true", False), (1, "true", True), (10, "auto", False), (11, "auto", True), (100, "false", False)],
)
def test_the_zeros_of_a_weight(zeros, keep, masked):
    weight = torch.ones(100)
    weight[:zeros] = 0.0
    mask = zero_mask(weight.view(10, 10), keep)
    assert (mask is not None) == masked
    if mask is not None:
        assert torch.equal(mask, weight.view(10, 10) != 0)


@pytest.mark.parametrize("zeros", [None, 5, {}, {"fraction": "half", "of": 4, "stored": "", "speed": ""}])
def test_what_another_program_says_of_zeros_is_not_repeated(zeros):
    card = SimpleNamespace(details={"zeros": zeros})
    assert stated_zeros(SimpleNamespace(card=card)) == {}
    known = {"fraction": 0.5, "of": 4, "stored": "as weights", "speed": "none", "zeros": 2}
    own = SimpleNamespace(card=SimpleNamespace(details={"zeros": known}))
    assert stated_zeros(own, "as codes") == {"zeros": {**known, "stored": "as codes"}}
