"""Importance against finite differences and against removing a unit for real."""

import pytest
import torch
from torch import nn

from attar.errors import NumericsError
from attar.models.anatomy import discover
from attar.pruning.criteria.gradient import gradient_importance, keep_most_important, masked
from attar.pruning.structures import STRUCTURES
from attar.pruning.structures.structure import units_of
from attar.walks.objectives import next_token_loss
from tests import tiny_models


def loss(model, tokens):
    return next_token_loss(model(input_ids=tokens).logits, tokens)


@pytest.mark.parametrize("family", ["llama3", "phi3", "gpt2", "opt", "gpt_neox"])
@pytest.mark.parametrize("method", ["heads", "neurons"])
def test_is_the_mean_absolute_derivative_of_the_mask(family, method):
    model = tiny_models.build(family)
    anatomy = discover(model)
    tokens = tiny_models.tokens(model, batch=3, length=8)
    modules, owners = STRUCTURES[method].units(model, anatomy)
    got = gradient_importance(model, modules, owners, loss, [tokens[:2], tokens[2:]])
    count, step = int(owners[0].max()) + 1, 1e-3
    model = model.double()
    layer, unit = 1, count - 1
    slopes = []
    with torch.no_grad():
        for row in tokens:
            values = []
            for sign in (1, -1):
                masks = [torch.ones(1, count, dtype=torch.float64) for _ in modules]
                masks[layer][0, unit] += sign * step
                with masked(modules, owners, masks):
                    logits = model(input_ids=row[None]).logits
                values.append(nn.functional.cross_entropy(logits[0, :-1], row[1:]))
            slopes.append(abs(float(values[0] - values[1])) / (2 * step))
    assert got[layer, unit].item() == pytest.approx(sum(slopes) / 3, rel=2e-2, abs=1e-6)


def test_does_not_depend_on_the_batch_size_and_leaves_the_model_alone():
    model = tiny_models.build("llama3")
    modules, owners = STRUCTURES["neurons"].units(model, discover(model))
    tokens = tiny_models.tokens(model, batch=4, length=8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    one = gradient_importance(model, modules, owners, loss, list(tokens.split(1)))
    all_ = gradient_importance(model, modules, owners, loss, [tokens])
    assert torch.allclose(one, all_, rtol=1e-3, atol=1e-7)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_unit_without_influence_has_no_importance():
    model = tiny_models.build("llama3")
    anatomy = discover(model)
    with torch.no_grad():
        model.get_submodule(anatomy.blocks[0].mlp.down.name).weight[:, 5] = 0.0
    modules, owners = STRUCTURES["neurons"].units(model, anatomy)
    got = gradient_importance(model, modules, owners, loss, [tiny_models.tokens(model)])
    assert got[0, 5] == 0.0 and got[0, 6] > 0.0
    assert 5 not in keep_most_important(got, 95)[0]


def test_nan_is_refused():
    model = tiny_models.build("llama3")
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    modules, owners = STRUCTURES["heads"].units(model, discover(model))
    with pytest.raises(NumericsError, match="not finite"):
        gradient_importance(model, modules, owners, loss, [tiny_models.tokens(model)])


def test_keep_is_ascending_and_breaks_ties_downwards():
    assert keep_most_important(torch.tensor([[0.1, 3.0, 2.0], [1.0, 1.0, 1.0]]), 2) == [[1, 2], [0, 1]]


def test_units_cover_every_column_once():
    assert units_of([range(2), range(2, 5)], 5).tolist() == [0, 0, 1, 1, 1]
    with pytest.raises(AssertionError):
        units_of([range(2)], 5)
