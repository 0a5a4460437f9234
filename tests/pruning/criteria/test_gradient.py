"""Importance against finite differences and against removing a unit for real."""

import pytest
import torch
from torch import nn

from attar.errors import NumericsError
from attar.models.anatomy.discover import discover
from attar.pruning.criteria.gradient import masked
from attar.pruning.selection import keep_most_important
from attar.pruning.structures import STRUCTURES
from tests import tiny_models
from tests.pruning.scored import scored


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["llama3", "phi3", "gpt2", "opt", "gpt_neox"])
@pytest.mark.parametrize("method", ["heads", "query-heads", "neurons"])
def test_is_the_mean_absolute_derivative_of_the_mask(family, method, tmp_path):
    model = tiny_models.build(family)
    anatomy = discover(model)
    tokens = tiny_models.tokens(model, batch=3, length=8)
    got = scored(model, method, "gradient", [tokens[:2], tokens[2:]], tmp_path)
    model = model.double()
    weights = STRUCTURES[method].weights(model, anatomy)
    count, step = weights[0].count, 1e-3
    layer, unit = 1, count - 1
    slopes = []
    with torch.no_grad():
        for row in tokens:
            values = []
            for sign in (1, -1):
                masks = [torch.ones(1, count, dtype=torch.float64) for _ in weights]
                masks[layer][0, unit] += sign * step
                with masked(weights, masks):
                    logits = model(input_ids=row[None]).logits
                values.append(nn.functional.cross_entropy(logits[0, :-1], row[1:]))
            slopes.append(abs(float(values[0] - values[1])) / (2 * step))
    assert got[layer, unit].item() == pytest.approx(sum(slopes) / 3, rel=2e-2, abs=1e-6)


def test_does_not_depend_on_the_batch_size_and_leaves_the_model_alone(tmp_path):
    model = tiny_models.build("llama3")
    tokens = tiny_models.tokens(model, batch=4, length=8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    one = scored(model, "neurons", "gradient", list(tokens.split(1)), tmp_path / "one")
    all_ = scored(model, "neurons", "gradient", [tokens], tmp_path / "all")
    assert torch.allclose(one, all_, rtol=1e-3, atol=1e-7)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_unit_without_influence_has_no_importance(tmp_path):
    model = tiny_models.build("llama3")
    anatomy = discover(model)
    with torch.no_grad():
        model.get_submodule(anatomy.blocks[0].mlp.down.name).weight[:, 5] = 0.0
    got = scored(model, "neurons", "gradient", [tiny_models.tokens(model)], tmp_path)
    assert got[0, 5] == 0.0 and got[0, 6] > 0.0
    assert 5 not in keep_most_important(got, 95)[0]


def test_nan_is_refused(tmp_path):
    model = tiny_models.build("llama3")
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(NumericsError, match="not finite"):
        scored(model, "heads", "gradient", [tiny_models.tokens(model)], tmp_path)
