"""Experts as Linears give what transformers' stacked experts give, and are called in every pass."""

import copy

import pytest
import torch
from torch import nn

from attar.checkpoint import open_checkpoint
from attar.errors import ModelError
from attar.models.anatomy.discover import discover
from attar.models.loading.empty import empty_model
from attar.models.loading.experts import Experts, stack_of, unstack
from attar.models.loading.stored import stored_names
from tests import tiny_models

ONE_BY_ONE = [f for f in tiny_models.MIXTURES if not f.startswith(("gpt_oss", "granite", "llama4"))]


@pytest.mark.few(4)
@pytest.mark.parametrize("family", ["gpt_oss", "llama4", *ONE_BY_ONE, "granitemoe", "granitemoehybrid"])
def test_equals_transformers(family):
    model = tiny_models.build(family)
    tokens = tiny_models.tokens(model, batch=3, length=16)
    expected = tiny_models.logits(model, tokens)
    unstack(model)
    assert not any(parameter.dim() == 3 and "expert" in name for name, parameter in model.named_parameters())
    torch.testing.assert_close(tiny_models.logits(model, tokens), expected, rtol=0, atol=2e-5)
    for block in discover(model).blocks:
        if block.mixture:
            with torch.no_grad():
                model.get_submodule(block.mixture.experts[3].down.name).weight.mul_(1.5)
    assert (tiny_models.logits(model, tokens) - expected).abs().max() > 1e-3


def test_linears_are_views_and_survive_a_copy():
    model = tiny_models.build("gpt_oss")
    stacked = model.model.layers[0].mlp.experts.gate_up_proj
    unstack(model)
    expert = model.model.layers[0].mlp.experts.get_submodule("5")
    assert torch.equal(expert.gate_proj.weight, stacked[5, :, ::2].T)
    assert expert.up_proj.weight.untyped_storage().data_ptr() == stacked.untyped_storage().data_ptr()
    assert not hasattr(expert.activation.__self__, "down_proj")
    tokens = tiny_models.tokens(model)
    logits = [tiny_models.logits(one, tokens) for one in (copy.deepcopy(model), model)]
    assert torch.equal(*logits)


def test_every_expert_is_called_with_the_tokens_that_chose_it():
    model = unstack(tiny_models.build("mixtral"))
    layer = model.model.layers[0].mlp
    called, chosen = {}, []
    layer.experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1]))
    for number, expert in enumerate(layer.experts):
        hook = lambda _, args, number=number: called.update({number: len(args[0])})  # noqa: E731
        expert.w1.register_forward_pre_hook(hook)
    tiny_models.logits(model, tiny_models.tokens(model, batch=1, length=3))
    assert called == {number: int((chosen[0] == number).sum()) for number in range(8)}
    assert sum(called.values()) == 6 and 0 in called.values()
    called.clear()
    empty = empty_model(tiny_models.config("mixtral"), unstacked=True)
    for number, expert in enumerate(empty.model.layers[0].mlp.experts):
        expert.w2.register_forward_pre_hook(
            lambda _, args, number=number: called.update({number: len(args[0])})
        )
    empty.model.layers[0].mlp(torch.empty(1, 3, 64, device="meta"))
    assert called == dict.fromkeys(range(8), 1)


def test_gate_and_up_of_an_expert_get_the_same_tensor():
    model, seen = unstack(tiny_models.build("qwen3_moe")), {}
    for name in ("gate_proj", "up_proj"):
        linear = model.model.layers[1].mlp.experts.get_submodule("2").get_submodule(name)
        linear.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0]}))
    tiny_models.logits(model, tiny_models.tokens(model))
    assert seen["gate_proj"] is seen["up_proj"]


@pytest.mark.few(3)
@pytest.mark.parametrize("family", ONE_BY_ONE)
def test_every_parameter_has_its_stored_tensor(tmp_path, family):
    model = tiny_models.build(family)
    checkpoint = open_checkpoint(tiny_models.save(model, tmp_path / "model"))
    unstack(model)
    names = stored_names(model, checkpoint)
    for name, parameter in model.named_parameters():
        assert torch.equal(checkpoint.load(names[name]), parameter), name
    assert len(set(names.values())) == len(names)


class Stacked(nn.Module):
    def __init__(self, up, down, **further):
        super().__init__()
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.zeros(shape)) for shape in (up, down))
        for name, shape in further.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))

    def forward(self, hidden, index, weights):
        return hidden


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("hidden", "neurons"), [(8, 8), (8, 4), (4, 8), (8, 16)])
def test_the_sizes_follow_from_the_shapes(hidden, neurons, transposed):
    up, down = (2 * neurons, hidden), (hidden, neurons)
    shapes = [(3, *(reversed(shape) if transposed else shape)) for shape in (up, down)]
    stack = stack_of(Stacked(*shapes))
    assert (stack.count, stack.hidden, stack.neurons, stack.transposed) == (3, hidden, neurons, transposed)


def test_what_is_not_understood_is_refused():
    with pytest.raises(
        ModelError, match=r"Stacked: gate_up_proj \[3, 8, 4\] and down_proj \[3, 4, 5\] are not"
    ):
        stack_of(Stacked((3, 8, 4), (3, 4, 5)))
    with pytest.raises(ModelError, match=r"stacks experts in a way that attar does not know: .*more_up"):
        stack_of(Stacked((3, 8, 4), (3, 4, 4), more_up=(3, 4, 4)))
    assert stack_of(nn.Linear(3, 3)) is None and stack_of(Experts([], False)) is None
