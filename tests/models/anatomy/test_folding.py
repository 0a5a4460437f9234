"""Folding random scales into float models of every family: the logits stay."""

import pytest
import torch
import transformers

from attar.models.anatomy.folding import Fold, foldable, rescaled, rescales
from attar.models.anatomy.probe import BlockProbe, alike
from attar.models.loading.empty import empty_model
from tests import tiny_models as tiny

# Kinds of the folds of one block, consumers of each, for every family of tiny_models.
SEPARATE = [("norm", 3), ("v", 1), ("norm", 2), ("up", 1)]
FUSED = [("norm", 1), ("v", 1), ("norm", 1)]
WANTED = {
    **dict.fromkeys(
        ["llama2", "llama3", "smollm", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"], SEPARATE
    ),
    "phi3": [*FUSED, ("up", 1)],
    "gpt2": FUSED,  # GELU and no gate: nothing before down
    "gpt_neox": FUSED,
    "opt": [("norm", 3), ("v", 1), ("norm", 1), ("up", 1)],  # ReLU is homogeneous
    **{family: [("v", 1)] for family in tiny.ENCODERS},  # post-norm
}
# Other shapes of block: one norm for attention and MLP, MQA, norms without a weight, norms behind.
OTHERS = {
    "phi": ("PhiConfig", "PhiForCausalLM", tiny.GQA, [("norm", 4), ("v", 1)]),
    "cohere": ("CohereConfig", "CohereForCausalLM", tiny.GQA, [("norm", 5), ("v", 1), ("up", 1)]),
    "bigcode": (
        "GPTBigCodeConfig",
        "GPTBigCodeForCausalLM",
        {**tiny.SHARED, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128},
        FUSED,
    ),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", tiny.GQA, [("v", 1), ("up", 1)]),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", tiny.GQA, [("v", 1), ("up", 1)]),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", tiny.GQA, [("norm", 3), ("v", 1), ("norm", 1)]),
}


def build(family):
    if family in tiny.FAMILIES:
        return tiny.build(family)
    config_class, model_class, arguments, _ = OTHERS[family]
    config = getattr(transformers, config_class)(**arguments)
    config.architectures = [model_class]
    return tiny.randomize(getattr(transformers, model_class)(config)).eval()


def random_scales(folds, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [(fold, fold.share(0.1 + 3 * torch.rand(len(fold.source), generator=g))) for fold in folds]


@pytest.mark.few(3)
@pytest.mark.parametrize("family", [*tiny.FAMILIES, *OTHERS])
def test_random_scales_leave_the_logits_alone(family):
    model = build(family)
    rows = tiny.tokens(model)
    wanted = tiny.logits(model, rows)
    actual = foldable(model)
    model.load_state_dict(rescaled(model.state_dict(), rescales(model, random_scales(actual.folds))))
    assert (tiny.logits(model, rows) - wanted).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.few(4)
@pytest.mark.parametrize("family", [*tiny.FAMILIES, *OTHERS])
def test_finds_the_folds_of_each_family(family):
    actual = foldable(build(family))
    wanted = WANTED[family] if family in WANTED else OTHERS[family][3]
    assert [(fold.kind, len(fold.consumers)) for fold in actual.folds] == wanted * 3


@pytest.mark.few(4)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_linear_is_folded_or_has_a_reason(family):
    probe, actual = BlockProbe(tiny.config(family)), foldable(tiny.build(family))
    linears = {name for block in probe.anatomy.blocks for name in block.linears}
    consumers = [name for fold in actual.folds for name in fold.consumers]
    assert len(set(consumers)) == len(consumers)
    assert set(consumers) | set(actual.left) == linears and not set(consumers) & set(actual.left)
    assert all(actual.left.values())


def test_reasons_name_the_activation_and_the_residual_stream():
    left = foldable(tiny.build("bert")).left
    assert "gelu" in left["bert.encoder.layer.0.output.dense"]
    assert "residual stream" in left["bert.encoder.layer.0.attention.self.query"]


def test_each_fold_alone_reaches_its_consumers(monkeypatch):
    """A scale on one fold moves that fold's weights and no others."""
    model = tiny.build("llama3")
    before = model.state_dict()
    for fold, scale in random_scales(foldable(model).folds):
        after = rescaled(before, rescales(model, [(fold, scale)]))
        moved = {name.rpartition(".")[0] for name in before if not torch.equal(before[name], after[name])}
        assert moved == {fold.producer, *fold.consumers}


def test_query_heads_of_a_kv_head_share_their_scale():
    fold = next(fold for fold in foldable(tiny.build("llama3")).folds if fold.kind == "v")
    assert fold.repeat == 2 and len(fold.source) == 64
    values = torch.arange(64.0)
    heads = values.reshape(4, 2, 8)  # 8 query heads of 8, two on each KV head
    assert torch.equal(fold.share(values), heads.amax(1, keepdim=True).expand(4, 2, 8).flatten())
    assert torch.equal(fold.share(values, "mean"), heads.mean(1, keepdim=True).expand(4, 2, 8).flatten())


def test_a_scale_that_is_not_shared_would_change_the_function():
    """What `source` is for: without it, GQA's fold is wrong."""
    model = tiny.build("llama3")
    rows = tiny.tokens(model)
    wanted = tiny.logits(model, rows)
    fold = next(fold for fold in foldable(model).folds if fold.kind == "v")
    scale = torch.linspace(0.2, 3.0, 64)
    model.load_state_dict(rescaled(model.state_dict(), rescales(model, [(fold, scale)])))
    assert (tiny.logits(model, rows) - wanted).abs().max() > 1e-2 * wanted.abs().max()


def test_gemmas_norms_count_from_one():
    assert {fold.offset for fold in foldable(tiny.build("gemma3")).folds if fold.kind == "norm"} == {1.0}
    assert {fold.offset for fold in foldable(tiny.build("llama3")).folds} == {0.0}


def test_needs_no_weights_and_changes_no_model():
    config = tiny.config("qwen2")
    model = empty_model(config)
    assert foldable(model) == foldable(config.to_dict() | {"architectures": config.architectures})
    assert all(parameter.is_meta for parameter in model.parameters())


def test_rescaling_keeps_types_and_inputs():
    model = tiny.build("gpt2").bfloat16()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = rescaled(state, rescales(model, random_scales(foldable(model).folds)))
    assert all(result[name].dtype == torch.bfloat16 for name in state)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert any(not torch.equal(state[name], result[name]) for name in state)


def test_fold_of_one_producer_row_each_is_left_alone_by_share():
    values = torch.rand(4)
    assert Fold("norm", "n", ("a",), (0, 1, 2, 3)).share(values) is values


def test_the_probe_is_the_same_each_time_and_sees_changes():
    probe = BlockProbe(tiny.config("opt"))
    block = probe.anatomy.blocks[1]
    base = probe.run(block)
    assert alike(probe.run(block).output, base.output)
    changed = probe.run(block, {block.mlp.up.name: lambda x: x * 2})
    assert alike(changed.inputs[block.mlp.down.name], 2 * base.inputs[block.mlp.down.name])
    assert alike(changed.inputs[block.mlp.up.name], base.inputs[block.mlp.up.name])


def test_no_scale_is_folded_into_a_norm_that_a_router_reads():
    found = foldable(tiny.build("mixtral"))
    kinds = {(fold.kind, tuple(name.rpartition(".")[2] for name in fold.consumers)) for fold in found.folds}
    assert kinds == {("norm", ("q_proj", "k_proj", "v_proj")), ("v", ("o_proj",))}
    assert "the router reads the same norm" in found.left["model.layers.1.mlp.experts.3.w1"]
