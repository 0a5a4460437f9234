"""Mixtures of experts in the compiled step against transformers in float32, however the tokens come."""

import dataclasses
import itertools

import pytest
import torch

from attar.errors import ModelError
from attar.kernels.packed import unpack
from attar.runtime.runner.compiled import Compiled, compiled
from attar.runtime.runner.compiled_weights import model_weights
from tests import tiny_mixtures
from tests.compiler import needs_compiler
from tests.runtime.runner.compiled_steps import LENGTH, in_bfloat16, logits_of, run, runner, tokens

pytestmark = needs_compiler

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "gpt_oss")
CLOSE = {"rtol": 0, "atol": 2e-4}


def built(family, **changes):
    return in_bfloat16(tiny_mixtures.build(family, **changes))


@pytest.mark.few(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("threads", [1, 3])
def test_logits_of_every_family(family, threads):
    """1, 2, 32 and 5 tokens in a step: one row for all experts, and rows by expert."""
    model, ids = built(family), tokens()
    actual, cuts = runner(model, threads=threads), [0, 1, 3, 35, LENGTH]
    rows = [run(actual, (0, ids, a, b, [5, 2, 9])) for a, b in itertools.pairwise(cuts)]
    torch.testing.assert_close(torch.cat(rows), logits_of(model, ids), **CLOSE)


@pytest.mark.parametrize("changes", [{}, {"n_group": 4, "topk_group": 2}, {"norm_topk_prob": False}])
def test_sigmoid_scores_with_a_correction_and_groups(changes):
    """DeepSeek V3's choice, as GLM-4 has it."""
    model, ids = built("glm4_moe", routed_scaling_factor=1.7, **changes), tokens()
    result = run(runner(model), (0, ids, 0, LENGTH, [5, 2, 9]))
    torch.testing.assert_close(result, logits_of(model, ids), **CLOSE)


def test_yarn_and_a_prediction_layer():
    """gpt-oss' rotary positions as it has them, and GLM's layer for further tokens, which is left out."""
    rope = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "truncate": False}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 16}
    model, ids = built("gpt_oss", rope_parameters=rope), tokens()
    result = run(runner(model), (0, ids, 0, LENGTH, [5, 2, 9]))
    torch.testing.assert_close(result, logits_of(model, ids), **CLOSE)
    model = built("glm4_moe")
    tensors = model.state_dict() | {"model.layers.3.eh_proj.weight": torch.zeros(64, 128)}
    result = run(compiled(model.config, tensors, blocks=8, kv_dtype="float32"), (0, ids, 0, 9, [5]))
    torch.testing.assert_close(result, logits_of(model, ids[:9]), **CLOSE)


@pytest.mark.few(3)
@pytest.mark.parametrize("weights", ["int4", "int8", "bf16"])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_a_token_does_not_depend_on_its_batch(family, weights, bits):
    """Bit by bit: alone, in chunks or with others, whatever experts those have, on any number of threads."""
    model, ids, other = built(family), tokens(), tokens(seed=7)
    alone = runner(model, threads=1, weights=weights, bits=bits, group=16)
    want = torch.cat([run(alone, (0, ids, at, at + 1, [5, 2, 9])) for at in range(LENGTH)])
    busy = runner(model, threads=3, weights=weights, bits=bits, group=16)
    first = run(busy, (1, other, 0, 32, [0, 1]), (0, ids, 0, 33, [5, 2, 9]))[32:]
    second = run(busy, (0, ids, 33, LENGTH, [5, 2, 9]), (1, other, 32, 33, [0, 1, 3]))[:-1]
    assert torch.equal(torch.cat([first, second]), want)


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_codes_are_those_of_the_weights(weights):
    """Against transformers with the rounded weights in the experts' places; activations of 16 bits."""
    model, ids = built("qwen2_moe"), tokens()
    actual = runner(model, weights=weights, group=16)
    for layer, packed in zip(model.model.layers, actual.weights.layers, strict=True):
        _write(layer, packed)
    with torch.no_grad():
        model.lm_head.weight.copy_(unpack(actual.weights.head))
    torch.testing.assert_close(
        run(actual, (0, ids, 0, LENGTH, [5, 2, 9])), logits_of(model, ids), rtol=0, atol=2e-3
    )


@torch.no_grad()
def _write(layer, packed):
    """Weights of a compiled layer into transformers' module."""
    attention, mlp, mixture = layer.self_attn, layer.mlp, packed.mixture
    parts = unpack(packed.qkv).split(
        [len(each.weight) for each in (attention.q_proj, attention.k_proj, attention.v_proj)]
    )
    for name, part in zip("qkv", parts, strict=True):
        getattr(attention, f"{name}_proj").weight.copy_(part)
    attention.o_proj.weight.copy_(unpack(packed.out))
    if mixture is None:
        dense = mlp, packed.gate_up, packed.down
    else:
        dense = mlp.shared_expert, mixture.shared_gate_up, mixture.shared_down
        mlp.experts.gate_up_proj.copy_(torch.stack([unpack(each) for each in mixture.gate_up]))
        mlp.experts.down_proj.copy_(torch.stack([unpack(each) for each in mixture.down]))
    module, gate_up, down = dense
    module.gate_proj.weight.copy_(unpack(gate_up)[: len(module.gate_proj.weight)])
    module.up_proj.weight.copy_(unpack(gate_up)[len(module.gate_proj.weight) :])
    module.down_proj.weight.copy_(unpack(down))


def test_experts_that_were_not_chosen_are_not_read():
    """Their bytes are NaN: a token's logits are the same, and those of a token that needs one are not."""
    model, ids = built("mixtral"), tokens()
    actual = runner(model)
    want = run(actual, (0, ids, 0, 1, [5]))
    used = [_chosen(model, ids[:1], index) for index in range(len(model.model.layers))]
    for layer, chosen in zip(actual.weights.layers, used, strict=True):
        for expert in set(range(4)) - chosen:
            for packed in (layer.mixture.gate_up[expert], layer.mixture.down[expert]):
                packed.data.view(torch.bfloat16).fill_(torch.nan)
    assert torch.equal(run(actual, (1, ids, 0, 1, [6])), want)
    assert run(actual, (1, ids, 0, LENGTH, [6, 7, 8]))[1:].isnan().any()


def _chosen(model, ids, layer):
    chosen = []
    hook = model.model.layers[layer].mlp.gate.register_forward_hook(lambda *_: chosen.append(_[-1][2]))
    logits_of(model, ids)
    hook.remove()
    return set(chosen[0].flatten().tolist())


def test_the_bytes_of_a_step_are_those_of_active_experts():
    weights = runner(built("mixtral"), weights="int4", group=16).weights
    experts = sum(packed.nbytes for layer in weights.layers for packed in layer.mixture.products)
    routers = 4 * 64 * 4 * 3
    assert weights.nbytes - weights.read_bytes == experts // 2 - routers


def test_what_is_refused():
    model = built("olmoe", clip_qkv=4.0)
    with pytest.raises(ModelError, match="clip_qkv"):
        runner(model)
    model = built("mixtral")
    tensors = model.state_dict()
    tensors["model.layers.0.mlp.experts.down_proj_bias"] = torch.zeros(4, 64)
    with pytest.raises(ModelError, match=r"no place for .*down_proj_bias"):
        compiled(model.config, tensors, blocks=4)
    weights = model_weights(model.config, model.state_dict(), model.state_dict().__getitem__)
    mixture = weights.layers[0].mixture
    fewer = dataclasses.replace(mixture, down=mixture.down[:3])
    routing = dataclasses.replace(mixture.routing, active=5)
    for changed in (fewer, dataclasses.replace(mixture, routing=routing)):
        layer = dataclasses.replace(weights.layers[0], mixture=changed)
        with pytest.raises(ModelError, match="experts"):
            Compiled(dataclasses.replace(weights, layers=(layer, *weights.layers[1:])), blocks=4)
