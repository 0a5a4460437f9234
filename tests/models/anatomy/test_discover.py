"""Anatomy: every family's parts, found without knowing the family; and errors that say what was not found."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from attar.errors import ModelError
from attar.models.anatomy.discover import discover
from attar.models.anatomy.parts import Attention, LatentAttention, NonAttentionMixer
from attar.models.loading.empty import empty_model
from tests import tiny_models

# blocks, embedding, positions, final norm, head; tied; (heads, KV heads, head width); neurons; gated
LLAMA_LIKE = ("model.layers", "model.embed_tokens", None, "model.norm", "lm_head")
WANTED = {
    "llama2": (*LLAMA_LIKE, False, (4, 4, 16), 96, True),
    "llama3": (*LLAMA_LIKE, False, (8, 4, 8), 96, True),
    "smollm": (*LLAMA_LIKE, True, (8, 4, 8), 96, True),
    "mistral": (*LLAMA_LIKE, False, (8, 4, 8), 96, True),
    "qwen2": (*LLAMA_LIKE, False, (8, 4, 8), 96, True),
    "qwen3": (*LLAMA_LIKE, True, (4, 2, 32), 96, True),
    "gemma2": (*LLAMA_LIKE, True, (4, 2, 32), 96, True),
    "gemma3": (*LLAMA_LIKE, True, (4, 2, 32), 96, True),
    "phi3": (*LLAMA_LIKE, False, (8, 4, 8), 96, True),
    "gpt2": (
        "transformer.h", "transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head",
        True, (4, 4, 16), 256, False,
    ),
    "opt": (
        "model.decoder.layers", "model.decoder.embed_tokens", "model.decoder.embed_positions",
        "model.decoder.final_layer_norm", "lm_head", True, (4, 4, 16), 96, False,
    ),
    "gpt_neox": (
        "gpt_neox.layers", "gpt_neox.embed_in", None, "gpt_neox.final_layer_norm", "lm_head",
        False, (4, 4, 16), 96, False,
    ),
    "bert": (
        "bert.encoder.layer", "bert.embeddings.word_embeddings", "bert.embeddings.position_embeddings", None,
        "cls.predictions.decoder", True, (4, 4, 16), 96, False,
    ),
    "roberta": (
        "roberta.encoder.layer", "roberta.embeddings.word_embeddings",
        "roberta.embeddings.position_embeddings", None, "lm_head.decoder", True, (4, 4, 16), 96, False,
    ),
    "distilbert": (
        "distilbert.transformer.layer", "distilbert.embeddings.word_embeddings",
        "distilbert.embeddings.position_embeddings", None, "vocab_projector", True, (4, 4, 16), 96, False,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=tiny_models.FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family):
    return tiny_models.build(family)


@pytest.mark.few(5)
def test_parts_are_where_they_are(family, model):
    anatomy = discover(model)
    attention, mlp = anatomy.blocks[1].attention, anatomy.blocks[1].mlp
    actual = (
        anatomy.blocks_name, anatomy.embedding, anatomy.positions, anatomy.final_norm, anatomy.head,
        anatomy.tied, (attention.heads, attention.kv_heads, attention.head_dim),
        mlp.neurons, mlp.gate is not None,
    )  # fmt: skip
    assert actual == WANTED[family]
    assert anatomy.causal == (family not in tiny_models.ENCODERS)
    assert (anatomy.hidden_size, anatomy.vocab_size, len(anatomy.blocks)) == (64, tiny_models.VOCABULARY, 3)
    assert mlp.activation in {"silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"}


def test_blocks_name_every_linear_once(model):
    anatomy = discover(model)
    for block in anatomy.blocks:
        inside = {
            f"{block.name}.{name}"
            for name, module in block.module.named_modules()
            if isinstance(module, (nn.Linear, Conv1D))
        }
        assert set(block.linears) == inside and len(block.linears) == len(inside)
        assert model.get_submodule(block.name) is block.module
        assert all(model.get_submodule(norm).weight.shape == (64,) for norm in block.norms)


def test_linears_are_in_forward_order(model):
    block, seen = discover(model).blocks[0], []
    handles = [
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
        for name in block.linears
    ]
    tiny_models.logits(model, tiny_models.tokens(model))
    for handle in handles:
        handle.remove()
    assert tuple(seen) == block.linears


@pytest.mark.few(5)
def test_meta_model_has_the_same_anatomy(model):
    empty = empty_model(model.config)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert discover(empty) == discover(model)


def weight_rows(model, part, rows):
    """View of rows of the stored weight, and of its bias when there is one."""
    module = model.get_submodule(part.name)
    inside = slice(rows.start, rows.stop)
    weight = module.weight[:, inside] if part.kind == "conv1d" else module.weight[inside]
    return [weight] if module.bias is None else [weight, module.bias[inside]]


@pytest.mark.few(4)
def test_groups_are_the_heads(family):
    """A head without values adds nothing; behind silenced columns of o its q, k and v do not matter."""
    reference = tiny_models.build(family)
    rows, block = tiny_models.tokens(reference), 1
    whole = tiny_models.logits(reference, rows)
    attention = discover(reference).blocks[block].attention
    group = attention.groups()[1]
    assert (
        len(group.q_rows)
        == len(group.o_columns)
        == attention.heads // attention.kv_heads * attention.head_dim
    )
    assert len(group.k_rows) == len(group.v_rows) == attention.head_dim

    without_values = tiny_models.build(family)
    silenced = tiny_models.build(family)
    with torch.no_grad():
        for view in weight_rows(without_values, attention.v, group.v_rows):
            view.zero_()
        o, inside = (
            silenced.get_submodule(attention.o.name),
            slice(group.o_columns.start, group.o_columns.stop),
        )
        (o.weight[inside] if attention.o.kind == "conv1d" else o.weight[:, inside]).zero_()
        expected = tiny_models.logits(silenced, rows)
        for part, index in (
            (attention.q, group.q_rows),
            (attention.k, group.k_rows),
            (attention.v, group.v_rows),
        ):
            for view in weight_rows(silenced, part, index):
                view.normal_()
    assert (expected - whole).abs().max() > 1e-2, "the head mattered"
    torch.testing.assert_close(tiny_models.logits(without_values, rows), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(tiny_models.logits(silenced, rows), expected, rtol=0, atol=1e-6)


@pytest.mark.few(5)
def test_neurons_are_the_mlp(family):
    """Behind silenced columns of down, the rows of up and gate no longer matter."""
    model = tiny_models.build(family)
    rows = tiny_models.tokens(model)
    mlp = discover(model).blocks[1].mlp
    with torch.no_grad():
        down = model.get_submodule(mlp.down.name)
        (down.weight[3:9] if mlp.down.kind == "conv1d" else down.weight[:, 3:9]).zero_()
        expected = tiny_models.logits(model, rows)
        for part in (mlp.up, mlp.gate):
            if part is not None:
                stored = part.stored_rows()[3:9]
                for view in weight_rows(model, part, range(stored[0], stored[-1] + 1)):
                    view.normal_()
    torch.testing.assert_close(tiny_models.logits(model, rows), expected, rtol=0, atol=1e-6)


def test_stored_rows_of_an_alternating_weight():
    attention = discover(tiny_models.build("gpt_neox")).blocks[0].attention
    assert attention.q.stored_rows()[:17] == [*range(16), 48]
    assert sorted([*attention.q.stored_rows(), *attention.k.stored_rows(), *attention.v.stored_rows()]) == [
        *range(192)
    ]


def test_bare_models_have_no_head():
    anatomy = discover(transformers.BertModel(tiny_models.config("bert")))
    assert anatomy.head is None and not anatomy.tied and anatomy.blocks_name == "encoder.layer"
    anatomy = discover(transformers.LlamaModel(tiny_models.config("llama3")))
    assert anatomy.head is None and anatomy.final_norm == "norm" and anatomy.blocks_name == "layers"


def test_text_part_of_a_multimodal_model():
    """The vision tower has as many layers of the same kind of parts."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.Gemma3Config(
        text_config={**tiny_models.config("gemma3").to_dict()},
        vision_config={**sizes, "image_size": 32, "patch_size": 8},
        mm_tokens_per_image=4,
    )
    config.architectures = ["Gemma3ForConditionalGeneration"]
    anatomy = discover(empty_model(config))
    assert anatomy.blocks_name == "model.language_model.layers"
    assert anatomy.blocks[0].mlp.neurons == 96 and anatomy.family == "gemma3_text"


@pytest.mark.parametrize(("family", "causal"), [("Bloom", True), ("DebertaV2", False), ("MPNet", False)])
def test_direction_of_attention_where_modules_do_not_say_it(family, causal):
    config = getattr(transformers, f"{family}Config")(vocab_size=64, num_hidden_layers=1)
    config.architectures = [f"{family}{'ForCausalLM' if causal else 'ForMaskedLM'}"]
    assert discover(empty_model(config)).causal is causal


def rename(model, block, old, new):
    """Give a projection an unknown name."""
    parent, _, leaf = old.rpartition(".")
    holder = model.model.layers[block].get_submodule(parent)
    holder.add_module(new, getattr(holder, leaf))
    delattr(holder, leaf)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("self_attn.q_proj", "strange", "q projection was not found in the attention of model.layers.1"),
        ("self_attn.o_proj", "strange", "o projection was not found in the attention of model.layers.1"),
        ("mlp.down_proj", "strange", "down projection was not found in the MLP of model.layers.1"),
        ("mlp.up_proj", "strange", "up projection was not found in the MLP of model.layers.1"),
    ],
)
def test_unknown_names_are_reported(old, new, sentence):
    model = tiny_models.build("llama3")
    rename(model, 1, old, new)
    with pytest.raises(ModelError) as caught:
        discover(model)
    assert (
        sentence in caught.value.message
        and "strange [" in caught.value.message
        and "\n" not in caught.value.message
    )


def test_two_candidates_are_reported():
    model = tiny_models.build("llama3")
    model.model.layers[0].mlp.add_module("fc1", nn.Linear(64, 96))
    with pytest.raises(ModelError, match=r"up projection could be model.layers.0.mlp.up_proj or .*fc1"):
        discover(model)


def test_no_blocks():
    model = tiny_models.build("llama3")
    model.model.layers = nn.Sequential(*model.model.layers)
    with pytest.raises(ModelError, match=r"blocks were not found.*seen there: model, model.embed_tokens"):
        discover(model)


def test_encoder_decoder():
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    with pytest.raises(ModelError, match="encoder-decoder"):
        discover(t5)


MIXERS = {  # of each block: what mixes its tokens, and its feed-forward half
    "qwen3_next": ["linear attention", "linear attention", "gated attention"],
    "granitemoehybrid": ["state space", Attention, "state space"],
    "lfm2_moe": ["convolution", Attention, "convolution"],
    "lfm2": ["convolution", Attention, "convolution"],
    "mamba2": ["state space"] * 3,
    "falcon_h1": ["state space and attention"] * 3,
    "nemotron_h": ["state space", "attention and no MLP", "nothing", "state space"],
    "deepseek_v2": [LatentAttention] * 3,
    "deepseek_v2_lite": [LatentAttention] * 3,
    "deepseek_v3": [LatentAttention] * 3,
}
FIRST_DENSE = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "glm4_moe", "lfm2_moe", "llama4")


@pytest.mark.few(4)
@pytest.mark.parametrize("family", ["nemotron_h", *tiny_models.MIXTURES, *tiny_models.HYBRIDS])
def test_families_with_experts_and_with_other_layers(family):
    anatomy = discover(empty_model(tiny_models.config(family), unstacked=True))
    for block, expected in zip(anatomy.blocks, MIXERS.get(family, [Attention] * 3), strict=True):
        mixer = block.mixer
        assert (mixer.kind if isinstance(mixer, NonAttentionMixer) else type(mixer)) == expected
        if not isinstance(expected, type) or expected is LatentAttention:
            with pytest.raises(ModelError, match=f"{re.escape(block.name)} has .* instead of plain self-att"):
                _ = block.attention
        assert set(block.linears) <= {f"{block.name}.{path}" for path, _ in block.module.named_modules()}
        mixture = block.mixture
        alone = family == "mamba2" or (family == "nemotron_h" and expected != "nothing")
        if family not in tiny_models.MIXTURES or (family in FIRST_DENSE and block.index == 0):
            assert mixture is None and (block.feed_forward is None) == alone
            continue
        if family == "llama4" and block.index == 2:
            continue
        assert mixture is not None and mixture.count == len(mixture.experts) == 8
        assert mixture.active == {"qwen2_moe": 4, "llama4": 1}.get(family, 2)
        assert len({expert.up.name for expert in mixture.experts}) == 8
        assert not {*mixture.dense} & {*block.linears} and {*mixture.linears} <= {*block.linears}
        root = block.module.get_submodule(mixture.router.removeprefix(f"{block.name}."))
        assert root.weight.shape == (8, 64)
        shared = {
            "qwen2_moe": 64,
            "deepseek_v2": 64,
            "deepseek_v2_lite": 64,
            "deepseek_v3": 32,
            "glm4_moe": 32,
        }
        shared |= {"granitemoehybrid": 64, "llama4": 32, "qwen3_next": 32}
        assert (mixture.shared.neurons if mixture.shared else None) == shared.get(family)
        assert (mixture.shared_gate is not None) == (family in ("qwen2_moe", "qwen3_next"))
        with pytest.raises(ModelError, match="has a mixture of experts instead of a dense MLP"):
            _ = block.mlp


def test_stacked_experts_are_seen_before_they_are_unstacked():
    mixture = discover(tiny_models.build("mixtral")).blocks[0].mixture
    assert mixture.count == 8 and mixture.experts == () and mixture.router == "model.layers.0.mlp.gate"


def test_a_router_that_is_not_found_is_reported():
    model = empty_model(tiny_models.config("mixtral"))
    model.model.layers[1].mlp.gate = nn.Linear(64, 7)
    with pytest.raises(ModelError, match=r"router of 8 experts was not found in model.layers.1.mlp"):
        discover(model)


def test_a_number_of_kv_heads_that_a_family_without_groups_carries_along():
    """OPT's attention has no groups of heads; converted configs have the key all the same."""
    model = tiny_models.build("opt")
    model.config.num_key_value_heads = 2
    assert {block.attention.kv_heads for block in discover(model).blocks} == {4}


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("num_attention_heads", 4, "has 8 heads, but the config's num_attention_heads is 4"),
        ("num_key_value_heads", 2, "has 4 KV heads, but the config's num_key_value_heads is 2"),
        ("num_hidden_layers", 5, "model.layers has 3 blocks, but the config's num_hidden_layers is 5"),
        ("intermediate_size", 97, "has 96 neurons, but the config says otherwise"),
        ("hidden_size", 32, "64 wide, but the config's hidden_size is 32"),
    ],
)
def test_config_that_contradicts_the_model(key, value, sentence):
    model = tiny_models.build("llama3")
    setattr(model.config, key, value)
    with pytest.raises(ModelError) as caught:
        discover(model)
    assert sentence in caught.value.message


def test_blocks_of_gemma_4_with_wider_heads_and_shared_keys():
    """Published shapes: full attention has other heads, the last blocks no keys, the 31B no values there."""
    shape = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
    same = tiny_models.build("gemma4", **shape, attention_k_eq_v=True, num_global_key_value_heads=1)
    blocks = discover(same).blocks
    assert [block.mixer.kind for block in blocks[1::2]] == ["attention without its own keys and values"] * 2
    assert blocks[0].attention.kv_heads == 2 and blocks[0].attention.head_dim == 16
    shared = tiny_models.build("gemma4", **shape, num_kv_shared_layers=2, use_double_wide_mlp=True)
    blocks = discover(shared).blocks
    assert [block.mlp.neurons for block in blocks] == [96, 96, 192, 192]
    assert blocks[1].attention.head_dim == 512 and not hasattr(blocks[3].mixer, "k")
