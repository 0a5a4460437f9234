"""Architectures: names against the gguf package's table, numbers against transformers' configs, the way back,
and what is refused."""

import copy
import json
import re

import gguf
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from attar.errors import CheckpointError, ModelError
from attar.formats.gguf.architecture import key_of, sizes, window
from attar.formats.gguf.config import file_placements, hf_config
from attar.formats.gguf.families import ARCHITECTURES
from attar.formats.gguf.metadata import metadata, notes, size_label
from attar.formats.gguf.placement import Placement
from attar.formats.gguf.rope import FREQUENCIES, llama3_factors, read_rope
from attar.formats.gguf.tensor_map import (
    architecture,
    expected_placements,
    paired,
    placements,
    sorted_groups,
)
from attar.models.loading.configs import parse_config
from attar.models.loading.empty import empty_model
from tests.formats.gguf import variants
from tests.formats.gguf.variants import (
    GAIN_ONE,
    VARIANTS,
    build,
    given_back,
    loaded,
    placed_tensors,
    rope,
    said,
    stored,
    unstacked,
)


def written(variant):
    """Model, config, and the tensors of its file."""
    model = build(variant)
    config, state = said(model), stored(model)
    return model, config, placed_tensors(placements(config, state), state)


def test_every_family_has_a_tiny_model():
    assert {variants.said(variants.config(name))["model_type"] for name in VARIANTS} == ARCHITECTURES.keys()


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_what_is_taken_for_a_missing_key_is_what_transformers_takes(family):
    actual, config = ARCHITECTURES[family], parse_config({"model_type": family}).to_dict()
    for name, value in actual.defaults.items():
        theirs = config.get(key_of(actual, name), config.get("rope_parameters", {}).get(name))
        assert value == theirs, name
    for rule in actual.rules:
        assert rule.default == config.get(rule.key, rule.default), rule
    assert bool(config["tie_word_embeddings"]) == actual.defaults.get("tie_word_embeddings", False)
    if "kv_heads" not in actual.defaults and not actual.layer_norm and not actual.attention_free:
        assert config["num_key_value_heads"] == config["num_attention_heads"]


@pytest.mark.few(10)
@pytest.mark.parametrize("variant", VARIANTS)
def test_names_are_those_of_the_gguf_packages_table(variant):
    model = build(variant)
    result = architecture(said(model))
    kind = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == result.arch)
    table = gguf.get_tensor_name_map(kind, said(model).get("num_hidden_layers") or 3)
    for placement in placements(said(model), stored(model)):
        if placement.stored is None or (placement.gguf == "output.weight" and "embed_" in placement.stored):
            continue
        if placement.part is not None or placement.expert is not None:
            names = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[kind]}
            assert re.sub(r"blk\.\d+", "blk.{bid}", placement.gguf.rpartition(".")[0]) in names
            continue
        if placement.stored.endswith("shared_mlp.output_linear.weight"):
            continue  # what it is depends on whether there are experts
        converted = placement.stored.replace("correction_bias", "correction.bias").replace(
            "sinks", "sinks.weight"
        )
        converted = converted.replace("dt_bias", "dt_proj.bias").replace("expert_bias", "expert_bias.bias")
        if placement.gguf.endswith(".scale"):  # beside a weight, as the scale of a quantized one
            continue
        if placement.gguf.endswith("_scale.weight"):
            converted += ".weight"
        theirs = table.get_name(converted, try_suffixes=(".weight", ".bias"))
        assert theirs == placement.gguf, placement.stored


@pytest.mark.few(20)
@pytest.mark.parametrize("variant", VARIANTS)
def test_keys_are_those_of_the_gguf_package(variant):
    config = said(variants.config(variant))
    actual = architecture(config).arch
    known = {
        value.replace("{arch}", actual)
        for group in vars(gguf.Keys).values()
        if isinstance(group, type)
        for value in vars(group).values()
        if isinstance(value, str)
    }
    keys = metadata(config, "tiny")
    known |= {f"{actual}.attention.recurrent_layers"}  # of llama.cpp's source; the package is older
    assert keys.keys() <= known
    assert all(type(value) in (bool, int, float, str, list) for value in keys.values())


@pytest.mark.few(8)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_file_gives_a_model_of_the_same_shapes_and_settings(variant):
    model, config, result = written(variant)
    again = hf_config(metadata(config, "tiny"), result)
    rebuilt = empty_model(parse_config(json.loads(json.dumps(again))))
    shapes = {name: tensor.shape for name, tensor in rebuilt.state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in model.state_dict().items()}
    ours, theirs = rebuilt.config.to_dict(), model.config.to_dict()
    changed = {key for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]}
    may = {"bos_token_id", "eos_token_id", "pad_token_id", "dtype", "initializer_range", "hidden_act"}
    may |= {"rope_parameters"} if "longrope" in variant else set()
    may |= {"n_inner"} if variant == "gpt2" else set()
    may |= {"tie_word_embeddings"} if "tie" in variant or variant == "stablelm with biases" else set()
    may |= {"model_type", "architectures"} if variant == "mistral" else set()
    may |= {"sliding_window"} if variant == "gemma3 without windows" else set()
    may |= {"head_dim"} if variant.startswith("mixtral") else set()
    may |= {"intermediate_size", "block_auto_adjust_ff_dim"} if variant == "lfm2" else set()
    may |= {"rope_parameters"} if variant == "llama4 with rope of llama3" else set()
    may |= {key for key in changed if "multiplier" in key or key == "mamba_norm_before_gate"}
    assert changed <= may, {key: (theirs[key], ours[key]) for key in changed - may}


@pytest.mark.few(10)
@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_come_back_bit_for_bit(variant):
    model = build(variant)
    config, state = said(model), stored(model)
    for name, tensor in state.items():
        if "norm" in name and VARIANTS[variant][0] in GAIN_ONE:
            state[name] = tensor.bfloat16()
    placed = placements(config, state)
    seen = set()
    for item in placed:
        if item.stored:
            tensor = item.apply(state[item.stored])
            assert tuple(tensor.shape) == item.shape
            assert tensor.dtype == torch.float32 or item.matrix
            if item.negative_exp:
                exact = item.undo(item.apply(state[item.stored].bfloat16()), torch.bfloat16)
                assert torch.equal(exact, state[item.stored].bfloat16())
            elif item.scales:
                torch.testing.assert_close(item.undo(tensor), state[item.stored])
            elif item.part is None:
                assert torch.equal(item.undo(tensor, state[item.stored].dtype), state[item.stored]), item.gguf
            seen.add(item.stored)
    assert seen == state.keys()
    tensors = unstacked(placed_tensors(placed, state))
    for name, tensor in given_back([item for item in placed if item.part], tensors).items():
        assert torch.equal(tensor, state[name]), name


@pytest.mark.few(8)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_file_gives_the_model_back(variant):
    model, config, result = written(variant)
    again = hf_config(metadata(config, "tiny"), result)
    result = unstacked(result)
    state = given_back(file_placements(again, result), result)
    if "embed_out.weight" in state:
        state["lm_head.weight"] = state.pop("embed_out.weight")
    again["hidden_act"] = config.get("hidden_act", again.get("hidden_act"))
    rebuilt = loaded(parse_config(again), state)
    rows = torch.arange(3, 27)[None]
    with torch.no_grad():
        one, other = model(rows).logits, rebuilt(rows).logits
    torch.testing.assert_close(other, one, rtol=2e-5, atol=2e-5)


def test_a_file_of_llama_cpps_converter_says_the_same():
    """It leaves out what its loader takes by default."""
    _, config, result = written("qwen2")
    keys = metadata(config, "tiny")
    for leaf in ("attention.key_length", "attention.value_length", "vocab_size", "rope.dimension_count"):
        del keys[f"qwen2.{leaf}"]
    assert hf_config(keys, result) == hf_config(metadata(config, "tiny"), result)
    _, config, result = written("gemma2")
    keys = metadata(config, "tiny")
    del keys["gemma2.rope.freq_base"], keys["gemma2.rope.dimension_count"], keys["gemma2.vocab_size"]
    assert hf_config(keys, result) == hf_config(metadata(config, "tiny"), result)


def test_numbers_come_back_from_float32():
    config = said(variants.config("llama3"))
    keys = metadata(config, "tiny")
    for key, value in keys.items():
        keys[key] = float(torch.tensor(value)) if isinstance(value, float) else value
    _, _, result = written("llama3")
    again = hf_config(keys, result)
    assert again["rms_norm_eps"] == 1e-6 and again["rope_parameters"]["rope_theta"] == 500000.0


def test_special_tokens_and_dtype_are_read():
    _, config, result = written("qwen2")
    keys = metadata(config, "tiny") | {"tokenizer.ggml.eos_token_id": 7}
    result = {name: tensor.bfloat16() if tensor.dim() > 1 else tensor for name, tensor in result.items()}
    again = hf_config(keys, result)
    assert (again["eos_token_id"], again["bos_token_id"], again["dtype"]) == (7, None, "bfloat16")


def test_the_metadata_of_a_llama():
    config = said(variants.config("llama with rope of llama3"))
    assert metadata(config, "Tiny") == {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "Tiny",
        "general.size_label": "244K",
        "llama.block_count": 3,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 8,
        "llama.attention.head_count_kv": 4,
        "llama.attention.key_length": 32,
        "llama.attention.value_length": 32,
        "llama.vocab_size": 320,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.rope.dimension_count": 32,
        "llama.rope.freq_base": 10000.0,
    }


@pytest.mark.parametrize(
    "count", [1, 999, 4096, 134_515_008, 1_000_000_001, 1_543_714_304, 70_553_706_496, 10**13]
)
def test_size_labels_are_those_of_the_gguf_package(count):
    assert size_label(count) == gguf.size_label(count, 0, 0, 0)


# rotary embeddings

LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("changes", [
    {}, {"factor": 32.0}, {"low_freq_factor": 2.0, "high_freq_factor": 6.0},
    {"original_max_position_embeddings": 500, "rope_theta": 10000.0},
])  # fmt: skip
@pytest.mark.parametrize("head", [64, 128])
def test_llama3_factors_are_the_ratio_of_transformers_frequencies(changes, head):
    settings = {**LLAMA31, **changes}
    config = transformers.LlamaConfig(
        hidden_size=4 * head, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=settings
    )
    theirs, scale = ROPE_INIT_FUNCTIONS["llama3"](config)
    plain = 1.0 / settings["rope_theta"] ** (torch.arange(0, head, 2).double() / head)
    result = architecture(said(config) | {"architectures": []})
    rope = read_rope(said(config), result, sizes(said(config), result))
    ours = llama3_factors(rope)
    assert scale == 1.0 and ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), plain / theirs.double(), rtol=3e-6, atol=0)
    assert ours.min() == 1.0 and ours.max() == settings["factor"] and len(ours.unique()) > 3


@pytest.mark.parametrize("changes", [{}, {"factor": 32.0}, {"original_max_position_embeddings": 4096}])
def test_llama3_settings_are_found_again(changes):
    settings = {**LLAMA31, **changes}
    config = said(transformers.LlamaConfig(max_position_embeddings=131072, rope_parameters=settings))
    again = through_a_file(config)
    assert again["rope_parameters"] == settings


def test_other_settings_give_the_same_factors():
    settings = LLAMA31 | {"low_freq_factor": 2.0, "high_freq_factor": 8.0}
    config = said(transformers.LlamaConfig(rope_parameters=settings))
    again = through_a_file(config)
    assert again["rope_parameters"]["low_freq_factor"] == 1.0
    assert torch.allclose(factors(again), factors(config), rtol=1e-5)


def test_factors_of_no_kind_become_longrope():
    config = said(transformers.LlamaConfig(rope_parameters=LLAMA31))
    strange = torch.linspace(1, 3, 64) ** 2
    again = through_a_file(config, strange)
    assert again["rope_parameters"]["rope_type"] == "longrope"
    frequencies, scale = ROPE_INIT_FUNCTIONS["longrope"](transformers.LlamaConfig(**again))
    plain = 1.0 / 500000.0 ** (torch.arange(0, 128, 2).float() / 128)
    assert scale == 1.0 and torch.allclose(plain / frequencies, strange, rtol=1e-5)


def factors(config):
    return next(
        expected_placement.value
        for expected_placement in expected_placements(config)
        if expected_placement.gguf == FREQUENCIES
    )


def through_a_file(config, frequencies=None):
    """The config after the way through a file's metadata, without weights."""
    result = {
        expected_placement.gguf: torch.empty(expected_placement.shape, device="meta")
        for expected_placement in expected_placements(config)
    }
    result[FREQUENCIES] = factors(config) if frequencies is None else frequencies
    return hf_config(metadata(config, "x"), result)


OLD = {"rope_theta": 500000.0, "rope_scaling": {k: v for k, v in LLAMA31.items() if k != "rope_theta"}}


@pytest.mark.parametrize("family, new, old", [
    ("llama3", {"rope_parameters": LLAMA31}, OLD),
    ("llama3", rope("linear", factor=4.0),
     {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}}),
    ("llama3", rope("default", 5e5), {"rope_theta": 5e5, "rope_scaling": None}),
    ("gpt_neox", rope("default", 5e5, partial_rotary_factor=0.5),
     {"rotary_emb_base": 5e5, "rotary_pct": 0.5}),
    ("phi", rope("default", 1e5, partial_rotary_factor=0.75),
     {"rope_theta": 1e5, "partial_rotary_factor": 0.75}),
    ("gemma3", {"rope_parameters": {"full_attention": rope("linear", 1e6, factor=8.0)["rope_parameters"],
                                    "sliding_attention": rope("default", 5e3)["rope_parameters"]}},
     {"rope_theta": 1e6, "rope_local_base_freq": 5e3, "rope_scaling": {"type": "linear", "factor": 8.0}}),
    ("phi3", variants.LONG_PHI3,
     {"original_max_position_embeddings": 256, "rope_scaling": {"type": "su", **variants.LISTS}}),
])  # fmt: skip
def test_both_spellings_of_rotary_settings_mean_the_same(family, new, old):
    base = {key: value for key, value in said(variants.config(family)).items() if key != "rope_parameters"}
    one, other = {**base, **new}, {**base, **old}
    assert metadata(one, "x") == metadata(other, "x")
    for first, second in zip(expected_placements(one), expected_placements(other), strict=True):
        assert first.value is None or torch.equal(first.value, second.value)


def test_longrope_scales_as_transformers_does():
    config = variants.config("phi3 with longrope")
    _, scale = ROPE_INIT_FUNCTIONS["longrope"](config)
    assert metadata(said(config), "x")["phi3.rope.scaling.attn_factor"] == pytest.approx(scale, rel=1e-12)


# windows


@pytest.mark.parametrize("family, changes", [
    ("gemma2", {}), ("gemma3", {"num_hidden_layers": 13}), ("gemma3", {"sliding_window_pattern": 2}),
    ("mistral", {"sliding_window": 8}), ("mistral", {"sliding_window": None}), ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
])  # fmt: skip
@pytest.mark.parametrize("named", [True, False])
def test_windows_are_those_of_transformers(family, changes, named):
    kind, _, arguments = variants.FAMILIES[family]
    arguments = {key: value for key, value in arguments.items() if key != "layer_types"} | changes
    config = said(getattr(transformers, kind)(**arguments)) | changes
    layers = config["num_hidden_layers"]
    everywhere = "sliding_attention" if config["sliding_window"] else "full_attention"
    wanted = config.get("layer_types") or [everywhere] * layers
    if not named:
        config.pop("layer_types", None)
    seen = window(config, ARCHITECTURES[config["model_type"]], layers)
    assert (seen.blocks if seen else (False,) * layers) == tuple(
        item.startswith("sliding") for item in wanted
    )
    assert seen is None or seen.tokens == 8


def test_usual_windows_are_not_spelled_out():
    keys = metadata(said(variants.config("gemma3 with seven layers")), "x")
    assert keys["gemma3.attention.sliding_window"] == 8
    assert "gemma3.attention.sliding_window_pattern" not in keys
    keys = metadata(said(variants.config("gemma2 with marked layers")), "x")
    assert keys["gemma2.attention.sliding_window_pattern"] == [False, False, True]
    assert "gemma3.attention.sliding_window" not in metadata(
        said(variants.config("gemma3 without windows")), "x"
    )


def test_departures_are_reported():
    assert not notes(said(variants.config("llama3"))) and not notes(said(variants.config("gemma2")))
    config = said(variants.config("mistral")) | {"sliding_window": 8}
    assert "beyond 8 tokens" in notes(config)[0]
    assert metadata(config, "x")["llama.attention.sliding_window"] == 8
    assert "gelu" in notes(said(variants.config("gpt_neox")))[0]
    assert "over 256" in notes(said(variants.config("phi3 with longrope")))[0]


# refusals


@pytest.mark.parametrize("family, changes, word", [
    ("llama3", {"model_type": "opt"}, "opt"),
    ("llama3", {"model_type": None}, "None"),
    ("llama3", {"text_config": {}}, "language model"),
    ("llama3", {"hidden_act": "gelu"}, "hidden_act"),
    ("llama3", {"num_hidden_layers": [3]}, "num_hidden_layers"),
    ("llama3", {"intermediate_size": [96, 64, 96]}, "intermediate_size"),
    ("llama3", {"vocab_size": None}, "vocab_size"),
    ("llama3", {"head_dim": 7}, "odd"),
    ("llama3", {"num_key_value_heads": 3}, "KV heads"),
    ("llama3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ("llama3", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, None),
    ("llama3", {"partial_rotary_factor": 0.5}, "dimensions"),
    ("qwen2", {"head_dim": 16}, "heads"),
    ("qwen2", {"rope_parameters": LLAMA31}, "llama3"),
    ("deepseek_v2", rope("yarn", factor=4.0, mscale=0.7, mscale_all_dim=0.7, attention_factor=2.0),
     "attention_factor"),
    ("qwen2", rope("yarn", factor=4.0, beta_fast=16), "beta_fast"),
    ("qwen2", {"rope_parameters": {"rope_type": "yarn"}}, "factor"),
    ("qwen3", {"attention_bias": True}, "attention_bias"),
    ("gemma", {"tie_word_embeddings": False}, "tied"),
    ("llama3", {"rope_parameters": "default"}, "object"),
    ("gemma2", {"query_pre_attn_scalar": 100}, "query_pre_attn_scalar"),
    ("gemma2", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar"),
    ("gemma3", {"layer_types": ["sliding_attention"]}, "layer_types"),
    ("gemma2", {"num_hidden_layers": 46, "layer_types": None}, "query_pre_attn_scalar"),
    ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping"),
    ("gemma2", {"layer_types": ["full_attention"] * 3}, "window"),
    ("gemma2", {"layer_types": ["sliding_attention"]}, "layer_types"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma3", {"use_bidirectional_attention": True}, "bidirectional"),
    ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}, "linear"),
    ("phi3", rope("longrope", long_factor=[1.0], short_factor=[1.0]), None),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse"),
    ("gpt2", {"activation_function": "relu"}, "activation_function"),
    ("gpt_neox", {"attention_bias": False}, "attention_bias"),
    ("phi", {"qk_layernorm": True}, "qk_layernorm"),
    ("phi", {"tie_word_embeddings": True}, "tied"),
    ("starcoder2", {"use_bias": False}, "use_bias"),
    ("stablelm", {"use_parallel_residual": True}, "parallel"),
    ("smollm3", {"no_rope_layers": [1, 1, 0, 1, 1]}, "no_rope_layers"),
])  # fmt: skip
def test_what_llama_cpp_would_compute_otherwise_is_refused_by_name(family, changes, word):
    config = said(variants.config(family)) | changes
    if word is None:  # seen when the tensors are made
        with pytest.raises(ModelError, match="rope settings"):
            expected_placements(config)
        return
    with pytest.raises(ModelError, match=word) as caught:
        architecture(config)
    assert "\n" not in caught.value.message


def test_tensors_that_do_not_fit_are_named():
    model = build("llama3")
    config, state = said(model), stored(model)
    name = "model.layers.1.mlp.up_proj.weight"
    cases = {
        "has no tensor": {key: value for key, value in state.items() if key != name},
        "no place": {**state, "model.layers.1.mlp.extra.weight": state[name]},
        "config says": {**state, name: state[name][:64]},
    }
    for words, wrong in cases.items():
        with pytest.raises(CheckpointError, match=words) as caught:
            placements(config, wrong)
        assert "layers.1.mlp" in str(caught.value)
    for wrong in (
        "model.layers.3.mlp.up_proj.weight",
        "score.weight",
        "model.layers.0.self_attn.q_proj.bias",
    ):
        with pytest.raises(CheckpointError, match=wrong):
            placements(config, {**state, wrong: state[name]})


def test_files_that_do_not_fit_are_named():
    _, config, result = written("gemma3")
    keys = metadata(config, "x")
    with pytest.raises(ModelError, match="rwkv"):
        hf_config({"general.architecture": "rwkv"}, result)
    with pytest.raises(CheckpointError, match="block_count"):
        hf_config({key: value for key, value in keys.items() if key != "gemma3.block_count"}, result)
    for leaf, wrong in (
        ("attention.head_count", 0),
        ("attention.layer_norm_rms_epsilon", "small"),
        ("rope.freq_base", float("nan")),
        ("attention.sliding_window", [8]),
    ):
        with pytest.raises(CheckpointError, match=f"gemma3.{leaf} is"):
            hf_config({**keys, f"gemma3.{leaf}": wrong}, result)
    with pytest.raises(CheckpointError, match="epsilon is missing"):
        hf_config({key: value for key, value in keys.items() if not key.endswith("epsilon")}, result)
    with pytest.raises(ModelError, match="layer_types"):
        file_placements(
            hf_config({**keys, "gemma3.attention.sliding_window_pattern": [True]}, result), result
        )
    with pytest.raises(CheckpointError, match="feed_forward_length differs"):
        hf_config({**keys, "gemma3.feed_forward_length": [96, 64, 96]}, result)
    assert hf_config({**keys, "gemma3.feed_forward_length": [96, 96, 96]}, result) == hf_config(keys, result)
    again = hf_config(keys, result)
    for name, wrong in (
        (
            "blk.2.ffn_up.weight",
            {key: value for key, value in result.items() if key != "blk.2.ffn_up.weight"},
        ),
        ("blk.2.ffn_up.weight", {**result, "blk.2.ffn_up.weight": result["blk.2.ffn_up.weight"][:5]}),
        (
            "blk.2.ffn_gate_exps.weight",
            {**result, "blk.2.ffn_gate_exps.weight": result["output_norm.weight"]},
        ),
    ):
        with pytest.raises(CheckpointError, match=name):
            file_placements(again, wrong)


def test_old_and_bare_names_are_understood():
    model = build("gpt2")
    config, state = said(model), stored(model)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    bare |= {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "lm_head.weight": state["transformer.wte.weight"]}
    actual = {placement.gguf: placement.stored for placement in placements(config, bare)}
    assert actual["blk.1.attn_qkv.weight"] == "h.1.attn.c_attn.weight" and "output.weight" not in actual
    model = build("gpt_neox")
    config, state = said(model), stored(model)
    state["embed_out.weight"] = state.pop("lm_head.weight")
    actual = {placement.gguf: placement.stored for placement in placements(config, state)}
    assert actual["output.weight"] == "embed_out.weight"


def test_a_needed_head_is_a_copy_of_the_tied_embedding():
    _, _, result = written("gpt_neox tied")
    assert torch.equal(result["output.weight"], result["token_embd.weight"])


def test_inputs_are_not_changed():
    config = said(variants.config("gemma3 with marked layers"))
    before = copy.deepcopy(config)
    metadata(config, "x")
    expected_placements(config)
    assert config == before


@pytest.mark.few(20)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gemmas_norms_alone_gain_one(variant):
    gained = {
        expected_placement.gguf
        for expected_placement in expected_placements(said(variants.config(variant)))
        if expected_placement.plus
    }
    norms = {
        expected_placement.gguf
        for expected_placement in expected_placements(said(variants.config(variant)))
        if "norm" in expected_placement.gguf
    }
    norms -= {name for name in norms if name.endswith("ssm_norm.weight")}
    assert gained == (norms if VARIANTS[variant][0] in GAIN_ONE else set())


@pytest.mark.parametrize("variant, parts, rows", [
    ("llama with biases", ("attn_q", "attn_k"), None),
    ("granite with rope of llama3", ("attn_q", "attn_k"), None),
    ("smollm3", ("attn_q", "attn_k"), None),
    ("gpt_neox", ("attn_qkv",), 192),
    ("qwen2", (), None), ("phi3", (), None), ("olmo2", (), None), ("starcoder2", (), None),
])  # fmt: skip
def test_biases_are_ordered_as_their_weights_are(variant, parts, rows):
    placed = {
        expected_placement.gguf: expected_placement
        for expected_placement in expected_placements(said(variants.config(variant)))
    }
    ordered = {name for name, expected_placement in placed.items() if expected_placement.rows is not None}
    actual = {name.split(".")[2] for name in ordered}
    assert actual == set(parts)
    for name in ordered:
        bias = name.replace(".weight", ".bias")
        assert bias not in placed or torch.equal(placed[bias].rows, placed[name].rows)
        assert rows is None or len(placed[name].rows) == rows


def random_tensor(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("heads, width", [(1, 2), (4, 8), (3, 6), (2, 64)])
def test_pairing_interleaves_the_halves_of_a_head(heads, width):
    weight = random_tensor(heads * width, 5)
    expected = torch.empty_like(weight)
    for head in range(heads):
        for index in range(width // 2):
            expected[head * width + 2 * index] = weight[head * width + index]
            expected[head * width + 2 * index + 1] = weight[head * width + width // 2 + index]
    assert torch.equal(weight[paired(heads, width)], expected)


@pytest.mark.parametrize("heads, kv_heads, width", [(4, 4, 8), (6, 2, 4), (5, 1, 2)])
def test_sorting_takes_the_groups_apart(heads, kv_heads, width):
    item = heads // kv_heads
    rows = [
        (kind, group, part, row)
        for group in range(kv_heads)
        for kind, parts in (("q", item), ("k", 1), ("v", 1))
        for part in range(parts)
        for row in range(width)
    ]
    wanted = [row for kind in "qkv" for row in rows if row[0] == kind]
    assert [rows[index] for index in sorted_groups(heads, kv_heads, width)] == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_matrix_comes_back_bit_for_bit(dtype, transposed, ordered):
    rows = paired(2, 8) if ordered else None
    placement = Placement("g", "s", (16, 6), transposed=transposed, rows=rows)
    weight = random_tensor(*placement.stored_shape, dtype=dtype)
    before = weight.clone()
    placed = placement.apply(weight)
    assert placed.shape == (16, 6) and placed.dtype == dtype and placed.is_contiguous()
    restored = placement.undo(placed)
    assert torch.equal(restored, before) and torch.equal(weight, before) and restored.is_contiguous()
    for row in range(16):
        source = row if rows is None else int(rows[row])
        assert torch.equal(placed[row], weight[:, source] if transposed else weight[source])


@pytest.mark.parametrize("dtype, smallest", [(torch.bfloat16, -15), (torch.float16, -12)])
def test_norms_gain_one_in_float32_and_come_back(dtype, smallest):
    placement = Placement("g", "s", (4096,), plus=1.0, matrix=False)
    exponents = torch.randint(smallest, 2, (4096,), generator=torch.Generator().manual_seed(1))
    weight = (random_tensor(4096, seed=2).sign() * (1 + torch.rand(4096)) * 2.0**exponents).to(dtype)
    placed = placement.apply(weight)
    assert placed.dtype == torch.float32
    assert torch.equal(placed, (weight.double() + 1).float())
    assert torch.equal(placement.undo(placed, dtype), weight)


def test_a_float32_norm_comes_back_within_the_rounding_of_the_sum():
    placement = Placement("g", "s", (4096,), plus=1.0, matrix=False)
    weight = random_tensor(4096)
    error = (placement.undo(placement.apply(weight)) - weight).abs()
    assert (error <= 2**-23 * (weight + 1).abs().clamp(min=1)).all()


def test_a_files_norm_survives_the_checkpoint():
    placement = Placement("g", "s", (4096,), plus=1.0, matrix=False)
    file = 0.5 + 3 * torch.rand(4096, generator=torch.Generator().manual_seed(3))
    assert torch.equal(placement.apply(placement.undo(file)), file)


def test_what_is_no_matrix_becomes_float32():
    bias = random_tensor(16, dtype=torch.bfloat16)
    placement = Placement("g", "s", (16,), rows=paired(2, 8), matrix=False)
    placed = placement.apply(bias)
    assert placed.dtype == torch.float32 and torch.equal(placed, bias.float()[paired(2, 8)])
    assert torch.equal(placement.undo(placed, torch.bfloat16), bias)


@pytest.mark.parametrize(
    ("family", "change", "match"),
    [
        ("mamba2", {"n_groups": 3}, "8 heads of 16 in 3 groups, but llama.cpp needs whole groups"),
        ("mamba2", {"num_heads": 4}, "128 wide together"),
        ("mamba2", {"time_step_limit": [0.0, 0.1]}, "time_step_limit is"),
        ("lfm2", {"layer_types": ["conv"] * 3}, "some with attention, some without"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "one for each of 3 blocks"),
        ("lfm2", {"conv_bias": True}, "conv_bias is True"),
        ("granitemoehybrid", {"mamba_d_head": "auto"}, "mamba_d_head is 'auto', but must be a whole number"),
        ("granitemoehybrid", {"position_embedding_type": "rope"}, "position_embedding_type is 'rope'"),
    ],
)
def test_states_that_llama_cpp_computes_otherwise_are_refused(family, change, match):
    config = said(variants.config(family)) | change
    with pytest.raises(ModelError, match=match):
        architecture(config)


def test_lfm2s_older_keys_are_read():
    config = said(variants.config("lfm2"))
    older = {key: value for key, value in config.items() if key != "layer_types"}
    older |= {"full_attn_idxs": [1], "block_ff_dim": older.pop("intermediate_size")}
    assert metadata(older, "tiny") == metadata(config, "tiny")
    assert sizes(config, architecture(config)).ff == 256  # two thirds of 96, up to the next 256


@pytest.mark.parametrize("counts", [[0, 0, 0], [2, 0, 4], 2, [True, 0, 0], "x"])
def test_kv_heads_that_mark_no_blocks_are_refused(counts):
    model = build("lfm2")
    keys = metadata(said(model), "tiny") | {"lfm2.attention.head_count_kv": counts}
    with pytest.raises(CheckpointError, match="head_count_kv is"):
        hf_config(keys, placed_tensors(placements(said(model), stored(model)), stored(model)))
