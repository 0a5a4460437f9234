"""Configs read without transformers: equal to transformers' in all that the compiled step reads."""

import dataclasses
import json

import pytest
import torch

from attar.models.loading.configs import load_config
from attar.models.loading.empty import empty_model
from attar.models.loading.plain_config import FAMILIES, PlainConfig, end_tokens, plain_config, plain_shapes
from attar.runtime.runner.compiled_weights import check_config
from attar.runtime.runner.step_config import rope, rotary_tables
from tests.tiny_models import config

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
OLD = {  # as config.json looked before transformers 5
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "intermediate_size": 96,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "rope_scaling": None,
}


def written(tmp_path, content):
    (tmp_path / "config.json").write_text(json.dumps(content))
    return load_config(tmp_path, content)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama2", {}),
        ("llama3", {"rope_parameters": LLAMA3}),
        ("smollm", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("gemma2", {}),
    ],
)
def test_a_config_is_transformers_own(family, changes, tmp_path):
    ours = config(family, **changes).to_dict()
    if ours["model_type"] == "qwen2":
        ours.pop("layer_types")
    theirs, plain = written(tmp_path, ours), plain_config(ours)
    assert isinstance(plain, PlainConfig)
    check_config(plain)
    for field in dataclasses.fields(PlainConfig):
        value = getattr(plain, field.name)
        if field.name == "hidden_act":
            theirs_act = getattr(theirs, "hidden_activation", None) or theirs.hidden_act
            assert value == theirs_act
        elif field.name == "layer_types" and value is None:
            assert set(getattr(theirs, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        elif field.name == "rope_parameters":
            assert rope(plain) == rope(theirs)
        elif field.name == "head_dim":
            assert value == (
                getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
            )
        else:
            assert value == getattr(theirs, field.name, None), field.name
    tables, reference = rotary_tables(plain, 300), rotary_tables(theirs, 300)
    assert tables.keys() == reference.keys()
    for kind, table in tables.items():
        assert torch.equal(table, reference[kind])


def test_a_config_of_older_transformers_is_the_same(tmp_path):
    theirs, plain = written(tmp_path, OLD), plain_config(OLD)
    assert rope(plain) == rope(theirs)
    assert torch.equal(
        rotary_tables(plain, 200)["full_attention"], rotary_tables(theirs, 200)["full_attention"]
    )


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gpt2"},
        {"model_type": "phi3"},
        {"num_key_value_heads": None},
        {"hidden_size": "64"},
        {"num_hidden_layers": True},
        {"rms_norm_eps": None},
        {"hidden_act": None},
        {"rope_theta": None},
        {"partial_rotary_factor": 0.5},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear"}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"model_type": "mistral"},  # whose window is left to a default
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64},
        {"model_type": "qwen3"},  # whose heads are left to a default
    ],
)
def test_what_a_default_or_another_rotation_decides_is_left_to_transformers(change):
    assert plain_config(OLD | change) is None


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama2", {}),
        ("llama3", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {}),
        ("gemma2", {}),
    ],
)
def test_the_tensors_are_those_of_transformers_model(family, changes):
    ours = config(family, **changes).to_dict()
    if ours["model_type"] == "qwen2":
        ours.pop("layer_types")
    ours["architectures"] = [type(empty_model(ours)).__name__]
    model = empty_model(ours)
    theirs = {name: tuple(item.shape) for name, item in model.named_parameters(remove_duplicate=False)}
    assert plain_shapes(ours) == theirs


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": None},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"intermediate_size": None},
        {"hidden_size": 66},
        {"num_key_value_heads": 3},
        {"hidden_act": "nosuch"},
        {"pad_token_id": 320},
    ],
)
def test_tensors_of_a_config_that_transformers_may_refuse_are_left_to_it(change):
    assert plain_shapes(OLD) is not None
    assert plain_shapes(OLD | change) is None


def test_every_family_is_one_of_the_compiled_step():
    from attar.runtime.runner.compiled_weights import FAMILIES as COMPILED

    assert set(FAMILIES) <= set(COMPILED)


def test_end_tokens_are_those_of_the_first_source_that_has_any():
    tokenizer = type("Tokenizer", (), {"eos_token_id": 9})()
    assert end_tokens(None, {"eos_token_id": [5, 7]}, tokenizer) == (5, 7)
    assert end_tokens({}, {"eos_token_id": None}, tokenizer) == (9,)
    assert end_tokens(None, {}) == ()
