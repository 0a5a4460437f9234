"""A new block drafter is its target's last layers."""

from dataclasses import replace

import pytest
import torch

from attar.distillation.head_settings import Eagle3Settings
from attar.distillation.heads import block_loss as block
from attar.distillation.heads import eagle3_loss as eagle3
from attar.distillation.heads.start import norm_scale, start_block_drafter
from attar.models.anatomy.discover import discover
from attar.models.draft_heads.decoder_layer import rotary, turned
from attar.models.head import head_of
from attar.models.hidden_states import recording_states
from tests import tiny_models
from tests.distillation.heads.drafters import options_of


def new(model, kind="dspark", **changes):
    layers = len(discover(model).blocks)
    return block.make(model, head_of(model), options_of(kind, context_layers=layers, **changes), None)


@pytest.mark.parametrize(("family", "depth"), [("llama3", 1), ("qwen3", 2)])
def test_the_context_has_the_keys_and_values_of_the_target(family, depth):
    """Where the target has no norm of keys, but for their size."""
    model = tiny_models.build(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("k_norm.weight"):
                parameter.uniform_(0.5, 2.0)
    drafter, length, seen = new(model, start="random", head_layers=depth), 9, {}
    with torch.no_grad():
        drafter.fc.weight.zero_()  # what it has besides
    start_block_drafter(drafter, model)
    blocks = discover(model).blocks
    first, d = blocks[len(blocks) - depth], drafter.config.shape.head_dim
    k, v = (
        first.attention.norms[1] if first.attention.norms else first.attention.k.name,
        first.attention.v.name,
    )
    for name in (k, v):
        model.get_submodule(name).register_forward_hook(
            lambda _, __, out, name=name: seen.update({name: out})
        )
    tokens, positions = tiny_models.tokens(model, batch=1, length=length), torch.arange(length)[None]
    with torch.no_grad(), recording_states(model, drafter.config.layers) as states:
        model(input_ids=tokens, use_cache=False)
        keys, values = drafter.context(torch.stack(states, 2), positions)
    torch.testing.assert_close(values[0].flatten(-2), seen[v])
    wanted = seen[k] if first.attention.norms else seen[k].unflatten(-1, (-1, d))
    if not first.attention.norms:
        size = drafter.layers[0].self_attn.k_norm.weight[0]
        wanted = wanted / wanted.square().mean(-1, keepdim=True).sqrt() * size
    wanted = turned(wanted, rotary(positions, drafter.config.shape))
    torch.testing.assert_close(keys[0], wanted, rtol=1e-3, atol=1e-4)


def test_eagle3_reads_with_the_keys_and_values_of_the_layer_behind():
    """But for what it reads of the embedding."""
    model = tiny_models.build("llama3")
    blocks, own = discover(model).blocks, head_of(model)
    head = eagle3.make(model, own, Eagle3Settings(), None)
    behind, seen = blocks[min(head.config.layers[-1] + 1, len(blocks) - 1)].attention, {}
    for name in (behind.k.name, behind.v.name):
        model.get_submodule(name).register_forward_hook(
            lambda _, __, out, name=name: seen.update({name: out})
        )
    head.config = replace(head.config, layers=(*head.config.layers[:-1], int(behind.name.split(".")[-2]) - 1))
    positions = torch.arange(9)[None]
    with torch.no_grad(), recording_states(model, head.config.layers) as states:
        model(input_ids=tiny_models.tokens(model, batch=1, length=9), use_cache=False)
        g = head.project(torch.stack(states, 2))
        inputs, residual = head.inputs(torch.zeros_like(g), g)
        keys, values = head.layers[0].self_attn.keys_values(inputs, rotary(positions, head.config.shape))
    torch.testing.assert_close(residual, states[-1])
    torch.testing.assert_close(values.flatten(-2), seen[behind.v.name])
    wanted = turned(
        seen[behind.k.name].unflatten(-1, (-1, behind.head_dim)), rotary(positions, head.config.shape)
    )
    torch.testing.assert_close(keys, wanted)


def test_a_drafter_begins_so_by_itself_or_at_random():
    model = tiny_models.build("llama3")
    near, far = new(model), new(model, start="random")
    own = discover(model).blocks[-1].module.mlp.down_proj.weight
    assert torch.equal(near.layers[-1].mlp.down_proj.weight, own)
    assert not torch.equal(far.layers[-1].mlp.down_proj.weight, own)
    assert far.norm.weight.eq(1).all()


def test_the_scale_of_a_norm():
    gemma = tiny_models.build("gemma2")
    norm = gemma.get_submodule(discover(gemma).final_norm)
    torch.testing.assert_close(norm_scale(norm), 1 + norm.weight.detach().float())
    assert norm_scale(torch.nn.LayerNorm(4)) is None


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "phi3"])
def test_what_does_not_fit_stays_random(family):
    """GPT-2 has no gate and norms with a mean, Gemma 2 four norms, Phi-3 fused projections."""
    model = tiny_models.build(family)
    near = new(model)
    part = discover(model).blocks[-1].attention.v
    stored = model.get_submodule(part.name).weight
    stored = (stored.T if part.kind == "conv1d" else stored)[part.stored_rows()]
    assert torch.equal(near.layers[-1].self_attn.v_proj.weight, stored)
    assert near.layers[-1].input_layernorm.weight.eq(1).all() == (family != "phi3")
    assert all(value.isfinite().all() for value in near.state_dict().values())
